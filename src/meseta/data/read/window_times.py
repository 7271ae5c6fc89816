"""Time that the rows of a window took to make, by kind of work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class WindowTimer:
    """Wall time of making the rows of a window. The three fields add up to the total."""

    storage_s: float = 0.0
    """Seconds of waiting for the bytes of files."""
    decode_s: float = 0.0
    """Seconds of decompressing, decoding, checking and filtering prepared files."""
    transform_s: float = 0.0
    """Seconds of encoding raw rows. 0 for prepared files."""

    @property
    def total_s(self) -> float:
        return self.storage_s + self.decode_s + self.transform_s

    def add_transform(self, seconds: float, read_share: float) -> None:
        """Add the time of making rows from raw files. `read_share` is the share in which the threads waited for
        bytes."""
        self.storage_s += seconds * read_share
        self.transform_s += seconds * (1.0 - read_share)

    def add_storage(self, seconds: float) -> None:
        self.storage_s += seconds

    @contextmanager
    def time_decoding(self) -> Iterator[None]:
        """Context manager that adds its duration, without waits for bytes, to `decode_s`."""
        begin_s, storage_s = time.perf_counter(), self.storage_s
        yield
        self.decode_s += max(time.perf_counter() - begin_s - (self.storage_s - storage_s), 0.0)
