"""Snapshots of some rows of a shard, for delta checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meseta.ops.memory import empty
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import Shard, TableSpec

BUFFER_GROWTH_FACTOR, MAX_BUFFER_RATIO = 1.125, 1.3
"""Limits for the reuse of buffers. A new buffer has room for `BUFFER_GROWTH_FACTOR` times its rows, because later
selections may be larger. A buffer that is more than `MAX_BUFFER_RATIO` times as large as necessary is not reused."""


class SelectedRows(ABC):
    """Snapshot of some rows of a shard, which training does not change. Callers read it once, in ascending order.

    Row indices are relative to the first row of the shard.
    """

    def __init__(self, spec: TableSpec, shard: Shard, like: Mapping[str, Tensor], rows: RowSet) -> None:
        self.spec = spec
        """Spec of the whole table."""
        self.shard = shard
        """Rows and columns of the table that the shard holds."""
        self.values = like
        """Tensors with the dtype and shape of each value for all rows of the shard, by name."""
        self.rows = rows
        """Selected rows."""

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
        """Return views of the buffers."""
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
