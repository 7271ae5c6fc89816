"""How long the rows of a window took to make, by what was done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class WindowTimer:
    """Seconds on the clock, filled by whoever makes the rows; together they are all that it took."""

    storage_s: float = 0.0
    """Waiting for the bytes of files."""
    decode_s: float = 0.0
    """From the bytes of prepared files to rows: decompressed, decoded, checked, filtered."""
    transform_s: float = 0.0
    """From raw rows to encoded ones; nothing where the data are prepared."""

    @property
    def total_s(self) -> float:
        """Of all that was done."""
        return self.storage_s + self.decode_s + self.transform_s

    def add_transform(self, seconds: float, read_share: float) -> None:
        """Rows were made of raw ones, on several threads that waited for bytes in this share of their time."""
        self.storage_s += seconds * read_share
        self.transform_s += seconds * (1.0 - read_share)

    def add_storage(self, seconds: float) -> None:
        """Bytes of a file were waited for."""
        self.storage_s += seconds

    @contextmanager
    def time_decoding(self) -> Iterator[None]:
        """What is done inside, but for waiting for bytes, is decoding."""
        begin_s, storage_s = time.perf_counter(), self.storage_s
        yield
        self.decode_s += max(time.perf_counter() - begin_s - (self.storage_s - storage_s), 0.0)
