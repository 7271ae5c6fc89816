"""Files of numbers that are mapped into memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def write_map(path: Path, parts: Iterable[NDArray[Any]]) -> None:
    """A new file of these parts on the disk, none of which the system keeps in memory."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part.tobytes())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def open_map(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Its numbers, to read and to change. Each page is asked for alone, which is the best for rows at random."""
    numbers = np.memmap(path, dtype, "r+", shape=shape)
    numbers._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return numbers
