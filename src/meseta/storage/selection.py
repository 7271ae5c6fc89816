"""Some rows of a shard as they were at one moment, for a save of what has changed."""

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
"""A buffer has room for so many times the rows that it is made for, since the next ones may be some more; it is used
again for others that it has room for, unless that is so many times what they need."""


class SelectedRows(ABC):
    """Rows of one placed piece of a table, ascending, counted from its first; they are read from the first to the last,
    and training does not change them."""

    def __init__(self, spec: TableSpec, shard: Shard, like: Mapping[str, Tensor], rows: RowSet) -> None:
        self.spec = spec
        """The whole table."""
        self.shard = shard
        """Which rows and columns of it the piece has."""
        self.values = like
        """By name a tensor of the type and the shape that the values of all its rows have."""
        self.rows = rows
        """Those selected."""

    @abstractmethod
    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """The selected rows of first..stop-1 by name, on the CPU; not to be written to."""

    @abstractmethod
    def close(self) -> None:
        """They are read no more."""


class CopiedRows(SelectedRows):
    """Rows in memory of their own."""

    def __init__(self, *of: Any, buffers: Mapping[str, Tensor]) -> None:
        """`buffers` [n or more, ...] by name begin with them."""
        super().__init__(*of)
        self.buffers = buffers

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Views."""
        begin = self.rows.count(0, first)
        end = begin + self.rows.count(first, stop)
        return {name: value[begin:end] for name, value in self.buffers.items()}

    def close(self) -> None:
        """Their memory is kept for the next ones."""


class LazyRows(SelectedRows):
    """Rows that are read where they are stored, a block at a time."""

    def __init__(self, *of: Any, read: Callable[[int, int], dict[str, Tensor]], close: Callable[[], None]) -> None:
        """`read(first, stop)` returns the selected rows among first..stop-1, at least one."""
        super().__init__(*of)
        self._read, self._close = read, close

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Of a block without a selected row, nothing is read."""
        if self.rows.count(first, stop):
            return self._read(first, stop)
        return {name: value.new_empty((0, *value.shape[1:]), device="cpu") for name, value in self.values.items()}

    def close(self) -> None:
        self._close()


def allocate_buffers(like: Mapping[str, Tensor], num_rows: int, reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Buffers [num_rows or more, ...] by name in the memory of the host, those of `reuse` where they fit."""
    former = reuse.buffers if isinstance(reuse, CopiedRows) else {}
    buffers = {}
    for name, value in like.items():
        room = former.get(name)
        if room is None or not num_rows <= len(room) <= max(MAX_BUFFER_RATIO * num_rows, 1024):
            with torch.inference_mode(False):
                room = empty((int(BUFFER_GROWTH_FACTOR * num_rows), *value.shape[1:]), value.dtype, keep=False)
        buffers[name] = room
    return buffers


def copy_rows(values: Mapping[str, Tensor], rows: RowSet, reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Buffers of `allocate_buffers` that begin with copies of some rows of `values`."""
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
