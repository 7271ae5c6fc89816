"""Triton kernel of `concat`."""
# Triton parses the source of this function, so that no decorator that checks types may wrap it.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = tl.constexpr(16), tl.constexpr(128)
"""Numbers of samples and columns per program."""


def concat(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `meseta.ops.concat.concat` on a GPU."""
    (num_samples, left), right = a.shape, b.shape[1]
    out = a.new_empty(num_samples, left + right, dtype=dtype)
    grid = triton.cdiv(num_samples, ROWS.value), triton.cdiv(left + right, COLUMNS.value)
    with torch.cuda.device_of(a):
        _concat[grid](out, a.contiguous(), b.contiguous(), num_samples, LEFT=left, RIGHT=right)
    return out


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _concat(out, a, b, num_samples, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_left = (row < num_samples) & (column < LEFT)
    is_right = (row < num_samples) & (column >= LEFT) & (column < LEFT + RIGHT)
    left = tl.load(a + row * LEFT + column, mask=is_left, other=0.0).to(out.dtype.element_ty)
    right = tl.load(b + row * RIGHT + (column - LEFT), mask=is_right, other=0.0).to(out.dtype.element_ty)
    tl.store(out + row * (LEFT + RIGHT) + column, tl.where(column < LEFT, left, right), mask=is_left | is_right)
