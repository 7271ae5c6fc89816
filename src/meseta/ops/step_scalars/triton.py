"""Kernel that writes the numbers of a step, which it receives as arguments."""

from __future__ import annotations

from struct import Struct
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 16
_HALVES = Struct(f"<{2 * WORDS}i")
"""Lower and upper half of each word. 32-bit integers always have the same type in Triton."""
_NAMES = [f"{half}{index}" for index in range(WORDS) for half in ("low", "high")]


def write_words(words: Tensor, packed: bytes) -> None:
    """Implement `reference.write_words` without a copy and without waiting. `words` has a multiple of 16 numbers."""
    with torch.cuda.device_of(words):
        for start in range(0, len(packed), _HALVES.size):
            part = packed[start : start + _HALVES.size].ljust(_HALVES.size, b"\0")
            _write_words[(1,)](words[start // 8 :], *_HALVES.unpack(part), num_warps=1)


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _join(low, high):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit(do_not_specialize=_NAMES)
@no_type_check
def _write_words(
    out,
    low0,
    high0,
    low1,
    high1,
    low2,
    high2,
    low3,
    high3,
    low4,
    high4,
    low5,
    high5,
    low6,
    high6,
    low7,
    high7,
    low8,
    high8,
    low9,
    high9,
    low10,
    high10,
    low11,
    high11,
    low12,
    high12,
    low13,
    high13,
    low14,
    high14,
    low15,
    high15,
):
    tl.store(out, _join(low0, high0))
    tl.store(out + 1, _join(low1, high1))
    tl.store(out + 2, _join(low2, high2))
    tl.store(out + 3, _join(low3, high3))
    tl.store(out + 4, _join(low4, high4))
    tl.store(out + 5, _join(low5, high5))
    tl.store(out + 6, _join(low6, high6))
    tl.store(out + 7, _join(low7, high7))
    tl.store(out + 8, _join(low8, high8))
    tl.store(out + 9, _join(low9, high9))
    tl.store(out + 10, _join(low10, high10))
    tl.store(out + 11, _join(low11, high11))
    tl.store(out + 12, _join(low12, high12))
    tl.store(out + 13, _join(low13, high13))
    tl.store(out + 14, _join(low14, high14))
    tl.store(out + 15, _join(low15, high15))
