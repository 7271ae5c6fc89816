"""Triton kernels of `mlp`: linear layers with one output."""
# Backward, a program handles BLOCK_SAMPLES samples and some columns, so that its sums need no atomics. Triton parses
# the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.linear.triton import BLOCK_SAMPLES, block_grid

NUM_ROWS = tl.constexpr(64)
"""Number of samples per program of the forward pass."""


def scalar_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Implement `meseta.ops.mlp.reference.scalar_linear` on a GPU."""
    num_samples, width = x.shape
    out = x.new_empty(num_samples, 1)
    with torch.cuda.device_of(x):
        _scalar_linear[(triton.cdiv(num_samples, NUM_ROWS.value),)](
            out, x.contiguous(), weight.contiguous(), bias, num_samples, WIDTH=width, RELU=relu
        )
    return out


def scalar_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, relu: bool, sums: Tensor, column: int
) -> Tensor:
    """Implement `meseta.ops.mlp.reference.scalar_linear_backward` on a GPU."""
    x = x.contiguous()
    x_gradient = torch.empty_like(x)
    num_samples, width = x.shape
    with torch.cuda.device_of(x):
        _scalar_linear_backward[block_grid(x)](
            x_gradient,
            sums[:, column:],
            gradient.contiguous(),
            x,
            weight.contiguous(),
            num_samples,
            sums.stride(0),
            FORM=2 * width + relu,
        )
    return x_gradient


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _scalar_linear(out, x, weight, bias, num_samples, WIDTH: tl.constexpr, RELU: tl.constexpr):
    COLUMNS: tl.constexpr = 16 if WIDTH <= 16 else 64
    TYPE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    total = tl.zeros([NUM_ROWS, COLUMNS], dtype=TYPE)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < num_samples)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(TYPE)
        if RELU:
            values = tl.where(values <= 0, 0.0, values)  # NaN stays NaN.
        total += values * tl.load(weight + column, mask=column < WIDTH, other=0.0).to(TYPE)[None, :]
    result = tl.sum(total, axis=1)
    if bias is not None:
        result += tl.load(bias).to(TYPE)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_samples)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _scalar_linear_backward(x_gradient, sums, gradient, x, weight, num_samples, stride, FORM: tl.constexpr):
    """FORM is 2 * width + relu. `sums` and `stride` are those of `linear.triton._mask_and_sum`."""
    WIDTH: tl.constexpr = FORM // 2
    RELU: tl.constexpr = FORM % 2
    COLUMNS: tl.constexpr = 16 if WIDTH <= 16 else 64
    ROWS: tl.constexpr = 2048 // COLUMNS
    TYPE: tl.constexpr = sums.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(TYPE)[None, :]
    x_total, weight_total = tl.zeros([ROWS, COLUMNS], dtype=TYPE), tl.zeros([ROWS, COLUMNS], dtype=TYPE)
    total = tl.zeros([ROWS], dtype=TYPE)
    for first in range(0, tl.minimum(num_samples - block * BLOCK_SAMPLES, BLOCK_SAMPLES), ROWS):
        row = block * BLOCK_SAMPLES + first + tl.arange(0, ROWS)
        inside = (row < num_samples)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        upstream = tl.load(gradient + row, mask=row < num_samples, other=0.0).to(TYPE)
        values = tl.load(x + place, mask=inside, other=0.0).to(TYPE)
        result = upstream[:, None] * factor
        if RELU:
            result = tl.where(values > 0, result, 0.0)
            values = tl.where(values <= 0, 0.0, values)
        tl.store(x_gradient + place, result.to(x_gradient.dtype.element_ty), mask=inside)
        x_total += result
        weight_total += upstream[:, None] * values
        total += upstream
    line = sums + block * stride
    if RELU:
        tl.store(line - WIDTH + column, tl.sum(x_total, axis=0), mask=column < WIDTH)
    tl.store(line + 1 + column, tl.sum(weight_total, axis=0), mask=column < WIDTH)
    tl.store(line + tl.zeros_like(column), tl.sum(total, axis=0), mask=column == 0)
