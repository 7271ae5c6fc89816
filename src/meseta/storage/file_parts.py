"""Rows of a file that are read from the first to the last, as saves read them: a part of the file at a time, at the
disk's sequential rate."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.memory import empty, give_back_kept
from meseta.ops.row_file import FrozenRows, RowRead
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec.tiers import PARTS_AHEAD


class _FilePart:
    """The selected ones of consecutive rows, in memory."""

    def __init__(self, frozen: FrozenRows, widths: Sequence[int], selected: RowSet, first: int) -> None:
        self.first, self.stop = first, min(first + frozen.part_rows, frozen.num_rows)
        self.num_left = num_rows = selected.count(self.first, self.stop)
        """Selected rows that nobody has taken yet."""
        self._values = [empty((num_rows, width), torch.uint8) for width in widths]
        rows = first if num_rows == self.stop - first else selected.rows(first, self.stop)
        self._reading: RowRead | None = frozen.read(rows, *self._values)
        self._present: Tensor | None = None
        self._lock = threading.Lock()

    def take(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """Return the values of the selected rows number begin..end-1 of the part, and which were ever written."""
        with self._lock:
            if self._reading is not None:
                self._present = self._reading.wait()
                self._reading = None  # it has lists of all rows
        assert self._present is not None
        return [value[begin:end] for value in self._values], self._present[begin:end]


class FrozenFile:
    """Sequential reader of the selected rows of a frozen file. It reads upcoming parts ahead, passes over parts without
    a selected row, and frees a part once all its selected rows have been taken."""

    def __init__(self, frozen: FrozenRows, widths: Sequence[int], selected: RowSet | None = None) -> None:
        """Each row has values of `widths` bytes; `None` selects all rows. Each selected row is to be taken once."""
        selected = RowSet.all(frozen.num_rows) if selected is None else selected
        self._frozen, self._widths, self._selected = frozen, widths, selected
        firsts = range(0, frozen.num_rows, frozen.part_rows)
        self._firsts = [at for at in firsts if selected.count(at, min(at + frozen.part_rows, frozen.num_rows))]
        """First rows of the parts that have selected rows."""
        self._newest = -1
        self._parts: dict[int, _FilePart] = {}
        """Parts in memory, by first row."""
        self._lock = threading.Lock()

    def take(self, first: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """Return the values of the selected rows among first..stop-1, of which there is at least one, and which of them
        were ever written; several threads may call."""
        size = self._frozen.part_rows
        taken = []
        for at in range(first // size * size, stop, size):
            begin, end = max(first, at), min(stop, at + size)
            if count := self._selected.count(begin, end):
                part, before = self._part(at), self._selected.count(at, begin)
                taken.append(part.take(before, before + count))
                self._count(part, count)
        if len(taken) == 1:
            return taken[0]
        values, present = zip(*taken, strict=True)
        return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(present)

    def close(self) -> None:
        """They are needed no longer."""
        with self._lock:
            self._parts.clear()
        self._frozen.close()
        give_back_kept()

    def _part(self, at: int) -> _FilePart:
        """The one that begins there; the next ones are on their way too."""
        with self._lock:
            number = bisect_left(self._firsts, at)
            for first in self._firsts[number : number + PARTS_AHEAD + 1]:
                if first == at or first > self._newest:
                    if first not in self._parts:
                        self._parts[first] = _FilePart(self._frozen, self._widths, self._selected, first)
                    self._newest = max(self._newest, first)
            return self._parts[at]

    def _count(self, part: _FilePart, num_rows: int) -> None:
        """So many more rows of it were taken."""
        with self._lock:
            part.num_left -= num_rows
            if part.num_left <= 0:
                self._parts.pop(part.first, None)
