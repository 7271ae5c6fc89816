"""Triton kernels of `mlp`: ReLU and bias gradients backward, and linear layers with few inputs or one output."""
# Backward, a program handles BLOCK_SAMPLES samples and some columns, so that its sums need no atomics. Triton parses
# the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.mlp import reference

BLOCK_SAMPLES = tl.constexpr(reference.BLOCK_SAMPLES)
NUM_ROWS = tl.constexpr(64)
"""Number of samples per program of the forward pass."""
MAX_COLUMNS = 64
"""Maximum number of columns per program."""


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `meseta.ops.mlp.reference.linear_relu` on a GPU, for float32 and at most 64 inputs."""
    (num_samples, num_inputs), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_samples, num_outputs)
    grid = triton.cdiv(num_samples, NUM_ROWS.value), triton.cdiv(num_outputs, _num_columns(num_outputs))
    with torch.cuda.device_of(x):
        _linear_relu[grid](
            out, x.contiguous(), weight.contiguous(), bias, num_samples, INPUTS=num_inputs, OUTPUTS=num_outputs
        )
    return out


def mask_and_sum(gradient: Tensor, output: Tensor, sums: Tensor, column: int) -> Tensor:
    """Implement `meseta.ops.mlp.reference.mask_and_sum` on a GPU."""
    masked = gradient.new_empty(gradient.shape)
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    num_samples, width = gradient.shape
    with torch.cuda.device_of(gradient):
        _mask_and_sum[_block_grid(gradient)](
            masked,
            sums[:, column:],
            gradient,
            output.contiguous(),
            num_samples,
            sums.stride(0),
            gradient.stride(0),
            WIDTH=width,
        )
    return masked


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
        _scalar_linear_backward[_block_grid(x)](
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


def _num_columns(width: int) -> int:
    # The kernels compute it too.
    return 16 if width <= 16 else MAX_COLUMNS


def _block_grid(matrix: Tensor) -> tuple[int, int]:
    num_samples, width = matrix.shape
    return triton.cdiv(num_samples, reference.BLOCK_SAMPLES), triton.cdiv(width, _num_columns(width))


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _linear_relu(out, x, weight, bias, num_samples, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    COLUMNS: tl.constexpr = 16 if OUTPUTS <= 16 else 64
    PADDED: tl.constexpr = 16 if INPUTS <= 16 else 64
    row = (tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    k = tl.arange(0, PADDED)
    is_sample, is_output = row < num_samples, column < OUTPUTS
    inputs = tl.load(x + row * INPUTS + k[None, :], mask=is_sample & (k < INPUTS)[None, :], other=0.0)
    weights = tl.load(weight + column * INPUTS + k[:, None], mask=is_output & (k < INPUTS)[:, None], other=0.0)
    result = tl.dot(inputs, weights, input_precision="ieee")
    if bias is not None:
        result += tl.load(bias + column, mask=is_output, other=0.0)
    result = tl.where(result <= 0, 0.0, result)  # NaN stays NaN.
    tl.store(out + row * OUTPUTS + column, result, mask=is_sample & is_output)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _mask_and_sum(masked, sums, gradient, output, num_samples, stride, gradient_stride, WIDTH: tl.constexpr):
    """`sums` has a row for each block of samples, and `stride` is the distance of its rows."""
    COLUMNS: tl.constexpr = 16 if WIDTH <= 16 else 64
    ROWS: tl.constexpr = 2048 // COLUMNS
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=sums.dtype.element_ty)
    for first in range(0, tl.minimum(num_samples - block * BLOCK_SAMPLES, BLOCK_SAMPLES), ROWS):
        row = (block * BLOCK_SAMPLES + first + tl.arange(0, ROWS))[:, None]
        inside = (row < num_samples) & (column < WIDTH)[None, :]
        place = row * WIDTH + column[None, :]
        is_active = tl.load(output + place, mask=inside, other=0.0) > 0
        values = tl.load(gradient + row * gradient_stride + column[None, :], mask=inside, other=0.0)
        values = tl.where(is_active, values, 0.0)
        tl.store(masked + place, values, mask=inside)
        total += values.to(total.dtype)
    tl.store(sums + block * stride + column, tl.sum(total, axis=0), mask=column < WIDTH)


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
    """FORM is 2 * width + relu. `sums` and `stride` are those of `_mask_and_sum`."""
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
