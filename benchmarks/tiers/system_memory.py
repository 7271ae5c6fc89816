"""Memory of this process, and files that are mapped into it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def write_map(path: Path, parts: Iterable[NDArray[Any]]) -> None:
    """Write a file that is not in the page cache."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part.tobytes())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def open_map(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file with MADV_RANDOM, the best advice for random rows."""
    numbers = np.memmap(path, dtype, "r+", shape=shape)
    numbers._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return numbers


def memory_bytes(kind: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, or VmHWM, the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")
