"""Snapshots of some rows of a shard, for delta checkpoints."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meseta.ops.memory import empty, release_idle_memory
from meseta.ops.row_file import PendingRowRead, RowFileSnapshot
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import Shard, TableSpec
from meseta.spec.tiers import NUM_PREFETCHED_PARTS

# A new buffer has room for later selections, which may be larger.
BUFFER_GROWTH_FACTOR, MAX_BUFFER_RATIO = 1.125, 1.3
"""Limits for the reuse of buffers. A new buffer has room for `BUFFER_GROWTH_FACTOR` times its rows. A buffer of more
than `MAX_BUFFER_RATIO` times the necessary size is not reused."""


class SelectedRows(ABC):
    """Snapshot of some rows of a shard, which training does not change. Callers read it once, in ascending order.

    Row indices are relative to the first row of the shard.
    """

    def __init__(self, spec: TableSpec, shard: Shard, like: Mapping[str, Tensor], rows: RowSet) -> None:
        self.spec = spec
        self.shard = shard
        """Rows and columns of the table that the shard holds."""
        self.values = like
        """Tensors with the dtype and shape of each value for all rows of the shard, by name."""
        self.rows = rows

    @abstractmethod
    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Return the selected rows in first..stop-1 by name, on the CPU. Do not modify the tensors."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the snapshot."""


class CopiedRows(SelectedRows):
    """Selected rows, copied into buffers in host memory."""

    def __init__(self, *of: Any, buffers: Mapping[str, Tensor]) -> None:
        """Take buffers [n or more, ...] by name, which start with the values of the selected rows."""
        super().__init__(*of)
        self.buffers = buffers

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        begin = self.rows.count(0, first)
        end = begin + self.rows.count(first, stop)
        return {name: value[begin:end] for name, value in self.buffers.items()}

    def close(self) -> None:
        pass  # The buffers are kept because the next selection may reuse them.


class LazyRows(SelectedRows):
    """Selected rows that are read from storage in blocks."""

    def __init__(self, *of: Any, read: Callable[[int, int], dict[str, Tensor]], close: Callable[[], None]) -> None:
        """Take `read(first, stop)`, which returns the selected rows in first..stop-1 if there is at least one."""
        super().__init__(*of)
        self._read, self._close = read, close

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        if self.rows.count(first, stop):
            return self._read(first, stop)
        return {name: value.new_empty((0, *value.shape[1:]), device="cpu") for name, value in self.values.items()}

    def close(self) -> None:
        self._close()


def allocate_buffers(like: Mapping[str, Tensor], num_rows: int, reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Return a buffer [num_rows or more, ...] in host memory for each value. Buffers of `reuse` are reused if they
    fit."""
    reusable = reuse.buffers if isinstance(reuse, CopiedRows) else {}
    buffers = {}
    for name, value in like.items():
        buffer = reusable.get(name)
        if buffer is None or not num_rows <= len(buffer) <= max(MAX_BUFFER_RATIO * num_rows, 1024):
            with torch.inference_mode(False):
                buffer = empty((int(BUFFER_GROWTH_FACTOR * num_rows), *value.shape[1:]), value.dtype, keep=False)
        buffers[name] = buffer
    return buffers


def copy_rows(values: Mapping[str, Tensor], rows: RowSet, reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Copy `rows` of `values` to the start of buffers from `allocate_buffers`, and return the buffers."""
    buffers, end = allocate_buffers(values, len(rows), reuse), 0
    for part in rows.parts():
        begin, end = end, end + len(part)
        for name, value in values.items():
            copies = buffers[name][begin:end]
            if value.device.type == "cpu":
                torch.index_select(value.detach(), 0, part, out=copies)
            else:
                copies.copy_(value.detach()[part.to(value.device)])
    return buffers


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
        self._last_started = -1
        self._chunks: dict[int, _SnapshotChunk] = {}
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
