"""Reference of the kernel that writes the numbers of a step, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS_PER_BLOCK = 7
"""Number of 64-bit words that one launch writes."""


def write_words(words: Tensor, packed: bytes) -> None:
    """Write little-endian 64-bit words to the start of `words`, int64 [n], a multiple of `WORDS_PER_BLOCK`.

    A GPU waits for the copy.
    """
    source = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    words[: len(source)].copy_(source)
