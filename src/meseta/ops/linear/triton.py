"""Triton kernels of linear layers."""
# Triton parses the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.linear import reference

BLOCK_SAMPLES = tl.constexpr(reference.BLOCK_SAMPLES)
MAX_COLUMNS = 64
"""Maximum number of columns per program of an element-wise kernel."""


def mask_and_sum(gradient: Tensor, output: Tensor, sums: Tensor, column: int) -> Tensor:
    """Implement `meseta.ops.linear.reference.mask_and_sum` on a GPU."""
    masked = gradient.new_empty(gradient.shape)
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    num_samples, width = gradient.shape
    with torch.cuda.device_of(gradient):
        _mask_and_sum[block_grid(gradient)](
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


def _num_columns(width: int) -> int:
    # The kernels compute it too.
    return 16 if width <= 16 else MAX_COLUMNS


def block_grid(matrix: Tensor) -> tuple[int, int]:
    """Return the grid of an element-wise kernel: blocks of samples, and blocks of columns."""
    num_samples, width = matrix.shape
    return triton.cdiv(num_samples, reference.BLOCK_SAMPLES), triton.cdiv(width, _num_columns(width))


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
