"""Triton kernels of `mlp`: ReLU and bias gradients backward, and linear layers with few inputs or one output."""
# Backward, a program handles BLOCK_SAMPLES samples and some columns, so that its sums need no atomics. Triton parses the
# source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.mlp.reference import BLOCK_SAMPLES

TILE_ELEMENTS = 2048
"""Number of elements that a program loads at a time."""
MAX_COLUMNS = 64
"""Maximum number of columns per program."""
NUM_ROWS = 64
"""Number of samples per program of `linear_relu`."""
MIN_DOT = 16
"""Minimum size of each dimension of `tl.dot`."""


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `meseta.ops.mlp.reference.linear_relu` on a GPU, for float32 and few inputs."""
    (num_samples, num_inputs), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_samples, num_outputs)
    columns = max(min(triton.next_power_of_2(num_outputs), MAX_COLUMNS), MIN_DOT)
    with torch.cuda.device_of(x):
        _linear_relu[(triton.cdiv(num_samples, NUM_ROWS), triton.cdiv(num_outputs, columns))](
            out,
            x.contiguous(),
            weight.contiguous(),
            bias,
            num_samples,
            num_inputs,
            num_outputs,
            ROWS=NUM_ROWS,
            COLUMNS=columns,
            INPUTS=max(triton.next_power_of_2(num_inputs), MIN_DOT),
        )
    return out


def mask_and_sum(gradient: Tensor, output: Tensor, sums: Tensor, column: int) -> Tensor:
    """Implement `meseta.ops.mlp.reference.mask_and_sum` on a GPU."""
    gradient, output = gradient.contiguous(), output.contiguous()
    masked = torch.empty_like(gradient)
    num_samples, width = gradient.shape
    grid, sizes = _launch_sizes(num_samples, width)
    with torch.cuda.device_of(gradient):
        _mask_and_sum[grid](masked, sums, gradient, output, num_samples, width, column, sums.shape[1], **sizes)
    return masked


def scalar_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Implement `meseta.ops.mlp.reference.scalar_linear` on a GPU."""
    num_samples, width = x.shape
    out = x.new_empty(num_samples, 1)
    columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
    rows = TILE_ELEMENTS // columns
    with torch.cuda.device_of(x):
        _scalar_linear[(triton.cdiv(num_samples, rows),)](
            out, x.contiguous(), weight.contiguous(), bias, num_samples, width, RELU=relu, ROWS=rows, COLUMNS=columns
        )
    return out


def scalar_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, relu: bool, sums: Tensor, column: int
) -> Tensor:
    """Implement `meseta.ops.mlp.reference.scalar_linear_backward` on a GPU."""
    x = x.contiguous()
    x_gradient = torch.empty_like(x)
    num_samples, width = x.shape
    grid, sizes = _launch_sizes(num_samples, width)
    with torch.cuda.device_of(x):
        _scalar_linear_backward[grid](
            x_gradient,
            sums,
            gradient.contiguous(),
            x,
            weight.contiguous(),
            num_samples,
            width,
            column,
            sums.shape[1],
            RELU=relu,
            **sizes,
        )
    return x_gradient


def _launch_sizes(num_samples: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return (grid, constants of the kernels)."""
    columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
    grid = triton.cdiv(num_samples, BLOCK_SAMPLES), triton.cdiv(width, columns)
    rows = min(TILE_ELEMENTS // columns, BLOCK_SAMPLES)
    return grid, {"BLOCK_ROWS": BLOCK_SAMPLES, "ROWS": rows, "COLUMNS": columns}


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _linear_relu(
    out,
    x,
    weight,
    bias,
    num_samples,
    num_inputs,
    num_outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    k = tl.arange(0, INPUTS)
    is_sample, is_output, is_input = row < num_samples, column < num_outputs, k < num_inputs
    inputs = tl.load(x + row * num_inputs + k[None, :], mask=is_sample & is_input[None, :], other=0.0)
    weights = tl.load(weight + column * num_inputs + k[:, None], mask=is_output & is_input[:, None], other=0.0)
    result = tl.dot(inputs, weights, input_precision="ieee")
    if bias is not None:
        result += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)
    result = tl.where(result <= 0, 0.0, result)  # NaN stays NaN.
    tl.store(out + row * num_outputs + column, result.to(out.dtype.element_ty), mask=is_sample & is_output)


@triton.jit(do_not_specialize=["num_samples", "first_sum"])
@no_type_check
def _mask_and_sum(
    masked,
    sums,
    gradient,
    output,
    num_samples,
    width,
    first_sum,
    num_sums,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=sums.dtype.element_ty)
    for first in range(0, BLOCK_ROWS, ROWS):
        row = (block * BLOCK_ROWS + first + tl.arange(0, ROWS))[:, None]
        inside = (row < num_samples) & (column < width)[None, :]
        place = row * width + column[None, :]
        is_active = tl.load(output + place, mask=inside, other=0.0) > 0
        values = tl.where(is_active, tl.load(gradient + place, mask=inside, other=0.0), 0.0)
        tl.store(masked + place, values, mask=inside)
        total += values.to(total.dtype)
    tl.store(sums + block * num_sums + first_sum + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _scalar_linear(
    out, x, weight, bias, num_samples, width, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    TYPE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], dtype=TYPE)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < num_samples)[:, None] & (column < width)[None, :]
        values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(TYPE)
        if RELU:
            values = tl.where(values <= 0, 0.0, values)  # NaN stays NaN.
        total += values * tl.load(weight + column, mask=column < width, other=0.0).to(TYPE)[None, :]
    result = tl.sum(total, axis=1)
    if bias is not None:
        result += tl.load(bias).to(TYPE)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_samples)


@triton.jit(do_not_specialize=["num_samples", "first_sum"])
@no_type_check
def _scalar_linear_backward(
    x_gradient,
    sums,
    gradient,
    x,
    weight,
    num_samples,
    width,
    first_sum,
    num_sums,
    RELU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    TYPE: tl.constexpr = sums.dtype.element_ty
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(TYPE)[None, :]
    x_total, weight_total = tl.zeros([ROWS, COLUMNS], dtype=TYPE), tl.zeros([ROWS, COLUMNS], dtype=TYPE)
    total = tl.zeros([ROWS], dtype=TYPE)
    for first in range(0, BLOCK_ROWS, ROWS):
        row = block * BLOCK_ROWS + first + tl.arange(0, ROWS)
        inside = (row < num_samples)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
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
    line = sums + block * num_sums + first_sum
    if RELU:
        tl.store(line - width + column, tl.sum(x_total, axis=0), mask=column < width)
    tl.store(line + 1 + column, tl.sum(weight_total, axis=0), mask=column < width)
    tl.store(line + tl.zeros_like(column), tl.sum(total, axis=0), mask=column == 0)
