"""Pieces of Triton that several operators use. Triton reads these functions: nothing may wrap them to check types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
VECTOR_BYTES = 16
"""What one lane loads at once where rows allow it."""
ADDRESSES_PER_LAUNCH = 7
"""Tensors of one launch of `_write`."""


class TensorMetadata(NamedTuple):
    """What of a tensor decides how kernels are launched on it."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_contiguous: bool


def tensor_metadata(tensors: Sequence[Tensor]) -> tuple[TensorMetadata, ...]:
    """Each tensor as part of a key, by which what follows from the tables of a model is found again in every step."""
    return tuple(TensorMetadata(t.data_ptr(), t.dtype, tuple(t.shape), t.is_contiguous()) for t in tensors)


def write_addresses(out: Tensor, tensors: Sequence[Tensor]) -> None:
    """int64 out[k] = where tensors[k] lies; `out` has room for the next multiple of ADDRESSES.

    For tensors that lie elsewhere in every step: a kernel writes the addresses, so the host does not wait, and a CUDA
    graph repeats it.
    """
    for first in range(0, len(tensors), ADDRESSES_PER_LAUNCH):
        some = tensors[first : first + ADDRESSES_PER_LAUNCH]
        _write_addresses[(1,)](out[first:], *some, *[some[-1]] * (ADDRESSES_PER_LAUNCH - len(some)), num_warps=1)


def padded_address_count(count: int) -> int:
    """`count`, rounded up to a multiple of ADDRESSES."""
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
    """The last index in [first, first + count) whose value is not above `wanted`; values ascend, the first one fits."""
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
    """[n, 16] -> [n]: the contract's tree. Sums of two numbers have one order, whatever the compiler makes of them."""
    N: tl.constexpr = values.shape[0]
    eight = tl.sum(tl.reshape(values, [N, 2, 8]), axis=1)
    four = tl.sum(tl.reshape(eight, [N, 2, 4]), axis=1)
    two = tl.sum(tl.reshape(four, [N, 2, 2]), axis=1)
    return tl.sum(two, axis=1)


@triton.jit
@no_type_check
def low_word(value):
    """The lower half of an int64, uint32."""
    return (value & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
@no_type_check
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011): the four words, uint32, of each counter under its key."""
    a = tl.zeros_like(c0) + 0xD2511F53
    b = tl.zeros_like(c0) + 0xCD9E8D57
    for _ in tl.static_range(10):
        low0, low2 = a * c0, b * c2
        high0, high2 = tl.umulhi(a, c0), tl.umulhi(b, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
