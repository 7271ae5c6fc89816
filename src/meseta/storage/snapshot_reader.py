"""Rows of a file that are read from the first to the last, as saves read them: a part of the file at a time, at the
disk's sequential rate."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.memory import empty, release_idle_memory
from meseta.ops.row_file import PendingRowRead, RowFileSnapshot
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec.tiers import NUM_PREFETCHED_PARTS


class _SnapshotChunk:
    """The selected ones of consecutive rows, in memory."""

    def __init__(self, frozen: RowFileSnapshot, widths: Sequence[int], selected: RowSet, first: int) -> None:
        self.first, self.stop = first, min(first + frozen.part_rows, frozen.num_rows)
        self.num_unread_rows = num_rows = selected.count(self.first, self.stop)
        """Selected rows that nobody has taken yet."""
        self._values = [empty((num_rows, width), torch.uint8) for width in widths]
        rows = first if num_rows == self.stop - first else selected.rows(first, self.stop)
        self._pending_read: PendingRowRead | None = frozen.read(rows, *self._values)
        self._is_written: Tensor | None = None
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """Return the values of the selected rows number begin..end-1 of the part, and which were ever written."""
        with self._lock:
            if self._pending_read is not None:
                self._is_written = self._pending_read.wait()
                self._pending_read = None  # it has lists of all rows
        assert self._is_written is not None
        return [value[begin:end] for value in self._values], self._is_written[begin:end]


class SnapshotReader:
    """Sequential reader of the selected rows of a frozen file. It reads upcoming parts ahead, passes over parts without
    a selected row, and frees a part once all its selected rows have been taken."""

    def __init__(self, frozen: RowFileSnapshot, widths: Sequence[int], selected: RowSet | None = None) -> None:
        """Each row has values of `widths` bytes; `None` selects all rows. Each selected row is to be taken once."""
        selected = RowSet.all(frozen.num_rows) if selected is None else selected
        self._snapshot, self._widths, self._selected = frozen, widths, selected
        firsts = range(0, frozen.num_rows, frozen.part_rows)
        self._chunk_starts = [at for at in firsts if selected.count(at, min(at + frozen.part_rows, frozen.num_rows))]
        """First rows of the parts that have selected rows."""
        self._last_started = -1
        self._chunks: dict[int, _SnapshotChunk] = {}
        """Parts in memory, by first row."""
        self._lock = threading.Lock()

    def read(self, first: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """Return the values of the selected rows among first..stop-1, of which there is at least one, and which of them
        were ever written; several threads may call."""
        size = self._snapshot.part_rows
        taken = []
        for at in range(first // size * size, stop, size):
            begin, end = max(first, at), min(stop, at + size)
            if count := self._selected.count(begin, end):
                part, before = self._get_chunk(at), self._selected.count(at, begin)
                taken.append(part.read(before, before + count))
                self._record_read(part, count)
        if len(taken) == 1:
            return taken[0]
        values, present = zip(*taken, strict=True)
        return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(present)

    def close(self) -> None:
        """They are needed no longer."""
        with self._lock:
            self._chunks.clear()
        self._snapshot.close()
        release_idle_memory()

    def _get_chunk(self, at: int) -> _SnapshotChunk:
        """The one that begins there; the next ones are on their way too."""
        with self._lock:
            number = bisect_left(self._chunk_starts, at)
            for first in self._chunk_starts[number : number + NUM_PREFETCHED_PARTS + 1]:
                if first == at or first > self._last_started:
                    if first not in self._chunks:
                        self._chunks[first] = _SnapshotChunk(self._snapshot, self._widths, self._selected, first)
                    self._last_started = max(self._last_started, first)
            return self._chunks[at]

    def _record_read(self, part: _SnapshotChunk, num_rows: int) -> None:
        """So many more rows of it were taken."""
        with self._lock:
            part.num_unread_rows -= num_rows
            if part.num_unread_rows <= 0:
                self._chunks.pop(part.first, None)
