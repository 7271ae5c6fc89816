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


def is_aligned(*numbers: int) -> bool:
    """Whether all addresses or sizes, in bytes, are multiples of `VECTOR_BYTES`."""
    return all(number % VECTOR_BYTES == 0 for number in numbers)


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


@triton.jit
@no_type_check
def load_row_parts(address, num_bytes, live, ROW: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Load 16 bytes of rows from each address: [A, B] -> float32 [A, B, VECTOR]. Parts that are not live are 0.

    The rows have `num_bytes` [A, B] left at the address. Elements after them are undefined.
    """
    VECTOR: tl.constexpr = 128 // ROW.primitive_bitwidth
    if IS_ALIGNED:
        place = tl.multiple_of(address.to(tl.pointer_type(ROW)), [16, 16])[:, :, None]
        lane = tl.arange(0, VECTOR)[None, None, :]
        # Each word is read once, so the first-level cache is left to ids. The second one keeps frequent rows.
        values = tl.load(place + lane, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
    else:
        w0, w1, w2, w3, w4 = _load_words(address, num_bytes, live)
        if VECTOR == 4:
            values = _join_four(w0, w1, w2, w3)
        else:
            bits = ((address & 2) * 8).to(tl.int32)
            w0, w1 = _shift_right(w0, w1, bits), _shift_right(w1, w2, bits)
            w2, w3 = _shift_right(w2, w3, bits), _shift_right(w3, w4, bits)
            words = _join_four(w0, w1, w2, w3)
            halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
            values = tl.reshape(halves, [words.shape[0], words.shape[1], VECTOR])
        values = values.to(ROW, bitcast=True)
    return values.to(tl.float32)


@triton.jit
@no_type_check
def _load_words(address, num_bytes, live):
    """Return the five words of 4 bytes from the last multiple of 4 on that is at most `address` [A, B]."""
    # They are in one or two words of 16 bytes. If one of these has a byte of the row, all of it can be read.
    shift = (address & 15).to(tl.int32)
    place = tl.multiple_of((address - shift).to(tl.pointer_type(tl.int32)), [16, 16])[:, :, None]
    lane = tl.arange(0, 4)[None, None, :]
    w0, w1, w2, w3 = _split_in_four(tl.load(place + lane, mask=live[:, :, None], other=0))
    live = live & (shift + num_bytes > 16)
    w4, w5, w6, w7 = _split_in_four(tl.load(place + (lane + 4), mask=live[:, :, None], other=0))
    two = (shift & 8) != 0
    w0, w1, w2 = tl.where(two, w2, w0), tl.where(two, w3, w1), tl.where(two, w4, w2)
    w3, w4, w5 = tl.where(two, w5, w3), tl.where(two, w6, w4), tl.where(two, w7, w5)
    one = (shift & 4) != 0
    w0, w1, w2 = tl.where(one, w1, w0), tl.where(one, w2, w1), tl.where(one, w3, w2)
    return w0, w1, w2, tl.where(one, w4, w3), tl.where(one, w5, w4)


@triton.jit
@no_type_check
def _split_in_four(words):
    """Split [A, B, 4] into four tensors [A, B]."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
@no_type_check
def _join_four(w0, w1, w2, w3):
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [w0.shape[0], w0.shape[1], 4])


@triton.jit
@no_type_check
def _shift_right(low, high, bits):
    """Return the lower 32 bits of the int64 with these int32 words, shifted right by `bits`."""
    pair = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return (pair >> bits).to(tl.int32)
