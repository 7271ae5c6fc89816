"""Triton functions shared by several operators."""
# Triton parses the source of its functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
VECTOR_BYTES = 16
"""Bytes that one lane loads with one instruction, if the alignment of rows allows it."""
ADDRESSES_PER_LAUNCH = 7
"""Maximum number of tensors per launch of `_write_addresses`."""


class TensorMetadata(NamedTuple):
    """Properties of a tensor on which the launch of a kernel depends."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_contiguous: bool


def tensor_metadata(tensors: Sequence[Tensor]) -> tuple[TensorMetadata, ...]:
    """Return the metadata of each tensor, as a cache key for launch parameters derived from a model's tables."""
    return tuple(TensorMetadata(t.data_ptr(), t.dtype, tuple(t.shape), t.is_contiguous()) for t in tensors)


def write_addresses(out: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the address of each tensor to `out`, int64 [padded_address_count(len(tensors))], without a host sync."""
    # A kernel writes the addresses, because these tensors are reallocated in every step. CUDA graphs can replay it.
    for first in range(0, len(tensors), ADDRESSES_PER_LAUNCH):
        some = tensors[first : first + ADDRESSES_PER_LAUNCH]
        _write_addresses[(1,)](out[first:], *some, *[some[-1]] * (ADDRESSES_PER_LAUNCH - len(some)), num_warps=1)


def padded_address_count(count: int) -> int:
    """Return `count` rounded up to a multiple of `ADDRESSES_PER_LAUNCH`."""
    return int(triton.cdiv(count, ADDRESSES_PER_LAUNCH)) * ADDRESSES_PER_LAUNCH


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g"])
@no_type_check
def _write_addresses(out, a, b, c, d, e, f, g):
    tl.store(out, a.to(tl.int64))
    tl.store(out + 1, b.to(tl.int64))
    tl.store(out + 2, c.to(tl.int64))
    tl.store(out + 3, d.to(tl.int64))
    tl.store(out + 4, e.to(tl.int64))
    tl.store(out + 5, f.to(tl.int64))
    tl.store(out + 6, g.to(tl.int64))


@triton.jit
@no_type_check
def find_last_at_most(values, first, count, wanted, live):
    """Return the last index in [first, first + count) whose value is at most `wanted`. Values must be ascending, and
    the first one at most `wanted`."""
    low, high = first, first + count
    width = count
    while width > 1:
        middle = (low + high) // 2
        fits = tl.load(values + middle, mask=live, other=0) <= wanted
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
        width = (width + 1) // 2
    return low


@triton.jit
@no_type_check
def sum_16(values):
    """Sum rows of 16 values: [n, 16] -> [n]. The order of additions is a fixed tree."""
    # Each step adds two numbers, whose sum has the same bits in either order.
    N: tl.constexpr = values.shape[0]
    eight = tl.sum(tl.reshape(values, [N, 2, 8]), axis=1)
    four = tl.sum(tl.reshape(eight, [N, 2, 4]), axis=1)
    two = tl.sum(tl.reshape(four, [N, 2, 2]), axis=1)
    return tl.sum(two, axis=1)


@triton.jit
@no_type_check
def low_word(value):
    """Return the lower 32 bits of an int64 as uint32."""
    return (value & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
@no_type_check
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four uint32 words that Philox4x32-10 (Salmon et al., SC 2011) generates from a counter and a key."""
    a = tl.zeros_like(c0) + 0xD2511F53
    b = tl.zeros_like(c0) + 0xCD9E8D57
    for _ in tl.static_range(10):
        low0, low2 = a * c0, b * c2
        high0, high2 = tl.umulhi(a, c0), tl.umulhi(b, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
