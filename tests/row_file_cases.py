"""Helpers of the tests of row files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta.ops.row_file.engine import IO_URING, THREADS, io_uring_unavailable_reason

ENGINES = [
    THREADS,
    pytest.param(
        IO_URING,
        marks=pytest.mark.skipif(io_uring_unavailable_reason() is not None, reason="io_uring is not to be had"),
    ),
]


def records_of(count: int, width: int, seed: int) -> Tensor:
    """Return random rows, uint8 [count, width]."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8))


def damage(path: Path, record: bytes) -> None:
    """Flip a bit of a record in one of the files."""
    with open(path, "r+b") as raw:
        content = raw.read()
        place = content.index(record) + len(record) // 2
        raw.seek(place)
        raw.write(bytes([content[place] ^ 1]))
        os.fsync(raw.fileno())
