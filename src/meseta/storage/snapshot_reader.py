"""Sequential reading of row files for checkpoints. Whole parts are read, at the sequential rate of the disk."""

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
    """Buffers for the selected rows of one part of the file, which is read asynchronously."""

    def __init__(self, frozen: RowFileSnapshot, widths: Sequence[int], selected: RowSet, first: int) -> None:
        self.first, self.stop = first, min(first + frozen.part_rows, frozen.num_rows)
        self.num_unread_rows = num_rows = selected.count(self.first, self.stop)
        """Number of selected rows that `SnapshotReader.read` has not returned yet."""
        self._values = [empty((num_rows, width), torch.uint8) for width in widths]
        rows = first if num_rows == self.stop - first else selected.rows(first, self.stop)
        self._pending_read: PendingRowRead | None = frozen.read(rows, *self._values)
        self._is_written: Tensor | None = None
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """Return (values, is_written) of the selected rows numbered begin..end-1 within the part."""
        with self._lock:
            if self._pending_read is not None:
                self._is_written = self._pending_read.wait()
                # Free the lists of row indices that the pending read holds.
                self._pending_read = None
        assert self._is_written is not None
        return [value[begin:end] for value in self._values], self._is_written[begin:end]


class SnapshotReader:
    """Thread-safe sequential reader of selected rows in a snapshot of a row file.

    It prefetches parts, skips parts without a selected row, and frees a part when all its selected rows were read.
    """

    def __init__(self, frozen: RowFileSnapshot, widths: Sequence[int], selected: RowSet | None = None) -> None:
        """Read rows with one value of each size in `widths`, in bytes. `selected` of `None` means all rows."""
        selected = RowSet.all(frozen.num_rows) if selected is None else selected
        self._snapshot, self._widths, self._selected = frozen, widths, selected
        firsts = range(0, frozen.num_rows, frozen.part_rows)
        self._chunk_starts = [
            chunk_start
            for chunk_start in firsts
            if selected.count(chunk_start, min(chunk_start + frozen.part_rows, frozen.num_rows))
        ]
        """First rows of the parts with selected rows."""
        self._last_started = -1
        self._chunks: dict[int, _SnapshotChunk] = {}
        """Parts in memory, by their first rows."""
        self._lock = threading.Lock()

    def read(self, first: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """Return (values, is_written) of the selected rows in first..stop-1. There must be at least one."""
        size = self._snapshot.part_rows
        chunks = []
        for chunk_start in range(first // size * size, stop, size):
            begin, end = max(first, chunk_start), min(stop, chunk_start + size)
            if count := self._selected.count(begin, end):
                chunk, before = self._get_chunk(chunk_start), self._selected.count(chunk_start, begin)
                chunks.append(chunk.read(before, before + count))
                self._record_read(chunk, count)
        if len(chunks) == 1:
            return chunks[0]
        values, present = zip(*chunks, strict=True)
        return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(present)

    def close(self) -> None:
        """Release the parts and the snapshot, and return idle memory to the OS."""
        with self._lock:
            self._chunks.clear()
        self._snapshot.close()
        release_idle_memory()

    def _get_chunk(self, at: int) -> _SnapshotChunk:
        # Each part is prefetched once. An earlier part may be in memory, or was read completely.
        with self._lock:
            number = bisect_left(self._chunk_starts, at)
            for first in self._chunk_starts[number : number + NUM_PREFETCHED_PARTS + 1]:
                if first == at or first > self._last_started:
                    if first not in self._chunks:
                        self._chunks[first] = _SnapshotChunk(self._snapshot, self._widths, self._selected, first)
                    self._last_started = max(self._last_started, first)
            return self._chunks[at]

    def _record_read(self, part: _SnapshotChunk, num_rows: int) -> None:
        with self._lock:
            part.num_unread_rows -= num_rows
            if part.num_unread_rows <= 0:
                self._chunks.pop(part.first, None)
