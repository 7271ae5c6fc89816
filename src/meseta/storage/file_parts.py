"""Rows of a file that are read from the first to the last, as saves read them: a part of the file at a time, at the
disk's sequential rate."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.memory import empty, give_back_kept
from meseta.ops.row_file import FrozenRows, RowRead

PARTS_AHEAD = 2
"""Parts that are read while one is taken: the disk is busy while another is looked up."""


class _FilePart:
    """Consecutive rows in memory."""

    def __init__(self, rows: FrozenRows, widths: Sequence[int], first: int) -> None:
        self.first, self.stop = first, min(first + rows.part_rows, rows.num_rows)
        self.num_left = self.stop - first
        """Rows that nobody has taken yet."""
        self._values = [empty((self.stop - first, width), torch.uint8) for width in widths]
        self._reading: RowRead = rows.read(first, *self._values)

    def take(self, first: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """Values of some of them, and which were ever written."""
        present, here = self._reading.wait(), slice(first - self.first, stop - self.first)
        return [value[here] for value in self._values], present[here]


class FrozenFile:
    """Frozen rows of a file. While one part is taken the next ones are read; one of which all rows were taken lives as
    long as what was taken of it."""

    def __init__(self, rows: FrozenRows, widths: Sequence[int]) -> None:
        """Each row has values of so many bytes."""
        self._rows, self._widths = rows, widths
        self._parts: dict[int, _FilePart] = {}
        """By first row."""
        self._newest = -1
        self._lock = threading.Lock()

    def take(self, first: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """As `FarSnapshot.take`; several threads may call."""
        size = self._rows.part_rows
        taken = []
        for at in range(first // size * size, stop, size):
            part = self._part(at)
            begin, end = max(first, part.first), min(stop, part.stop)
            taken.append(part.take(begin, end))
            self._count(part, end - begin)
        if len(taken) == 1:
            return taken[0]
        values, present = zip(*taken, strict=True)
        return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(present)

    def close(self) -> None:
        """They are needed no longer."""
        with self._lock:
            self._parts.clear()
        self._rows.close()
        give_back_kept()

    def _part(self, at: int) -> _FilePart:
        """The one that begins there; the next ones are on their way too."""
        with self._lock:
            for first in range(at, at + (PARTS_AHEAD + 1) * self._rows.part_rows, self._rows.part_rows):
                is_wanted = first == at or self._newest < first < self._rows.num_rows
                if is_wanted and first not in self._parts:
                    self._parts[first] = _FilePart(self._rows, self._widths, first)
                    self._newest = max(self._newest, first)
            return self._parts[at]

    def _count(self, part: _FilePart, num_rows: int) -> None:
        """So many more rows of it were taken."""
        with self._lock:
            part.num_left -= num_rows
            if part.num_left <= 0:
                self._parts.pop(part.first, None)
