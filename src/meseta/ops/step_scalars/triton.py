"""Kernel that writes the numbers of a step, which it receives as arguments."""

from __future__ import annotations

from struct import Struct
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.step_scalars.reference import WORDS_PER_BLOCK

_WORDS = Struct(f"<{WORDS_PER_BLOCK}q")


def write_words(words: Tensor, packed: bytes) -> None:
    """Implement `reference.write_words` without a copy and without waiting."""
    with torch.cuda.device_of(words):
        for start in range(0, len(packed), _WORDS.size):
            part = packed[start : start + _WORDS.size].ljust(_WORDS.size, b"\0")
            _write_words[(1,)](words[start // 8 :] if start else words, *_WORDS.unpack(part), num_warps=1)


# The annotations give all arguments the same type, however small a number is.
@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g"])
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _write_words(
    out, a: tl.int64, b: tl.int64, c: tl.int64, d: tl.int64, e: tl.int64, f: tl.int64, g: tl.int64
):  # fmt: skip
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)
    tl.store(out + 4, e)
    tl.store(out + 5, f)
    tl.store(out + 6, g)
