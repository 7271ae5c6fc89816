"""Triton kernel of `cross_network`: the element-wise part of a layer's backward pass with the bias gradient."""
# Triton parses the source of this function, so that no decorator that checks types may wrap it.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.linear import reference

BLOCK_SAMPLES = tl.constexpr(reference.BLOCK_SAMPLES)
MAX_COLUMNS = 64
"""Maximum number of columns per program."""


def cross_backward(
    gradient: Tensor,
    x0: Tensor,
    product: Tensor,
    x0_gradient: Tensor,
    sums: Tensor,
    is_last: bool,
    is_first: bool,
) -> Tensor:
    """Implement `meseta.ops.cross_network.reference.cross_backward` on a GPU."""
    product_gradient = torch.empty_like(x0)
    num_samples, width = x0.shape
    grid = triton.cdiv(num_samples, reference.BLOCK_SAMPLES), triton.cdiv(width, 16 if width <= 16 else MAX_COLUMNS)
    with torch.cuda.device_of(x0):
        _cross_backward[grid](
            product_gradient,
            x0_gradient,
            sums,
            gradient.contiguous(),
            x0,
            product,
            num_samples,
            FORM=4 * width + 2 * is_first + is_last,
        )
    return product_gradient


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _cross_backward(product_gradient, x0_gradient, sums, gradient, x0, product, num_samples, FORM: tl.constexpr):
    """FORM is 4 * width + 2 * is_first + is_last. A program handles BLOCK_SAMPLES samples and some columns, so that its
    sums need no atomics."""
    WIDTH: tl.constexpr = FORM // 4
    IS_FIRST: tl.constexpr = FORM // 2 % 2
    IS_LAST: tl.constexpr = FORM % 2
    COLUMNS: tl.constexpr = 16 if WIDTH <= 16 else 64
    ROWS: tl.constexpr = 1024 // COLUMNS  # With twice as many, registers are spilled.
    TYPE: tl.constexpr = sums.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=TYPE)
    for first in range(0, tl.minimum(num_samples - block * BLOCK_SAMPLES, BLOCK_SAMPLES), ROWS):
        row = (block * BLOCK_SAMPLES + first + tl.arange(0, ROWS))[:, None]
        inside = (row < num_samples) & (column < WIDTH)[None, :]
        place = row * WIDTH + column[None, :]
        upper = tl.load(gradient + place, mask=inside, other=0.0).to(TYPE)
        added = upper * tl.load(product + place, mask=inside, other=0.0).to(TYPE)
        if not IS_LAST:
            added += tl.load(x0_gradient + place, mask=inside, other=0.0).to(TYPE)
        if IS_FIRST:
            added += upper
        tl.store(x0_gradient + place, added.to(x0_gradient.dtype.element_ty), mask=inside)
        result = upper * tl.load(x0 + place, mask=inside, other=0.0).to(TYPE)
        tl.store(product_gradient + place, result.to(product_gradient.dtype.element_ty), mask=inside)
        total += result
    tl.store(sums + block * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)
