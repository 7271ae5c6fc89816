"""Some rows of a shard as they were at one moment, for a save of what has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.memory import empty
from meseta.spec import Shard, TableSpec

ROOM, MOST_ROOM = 1.125, 1.3
"""A buffer has room for so many times the rows that it is made for, since the next ones may be some more; it is used
again for others that it has room for, unless that is so many times what they need."""


class SelectedRows(ABC):
    """Rows of one placed piece of a table, ascending, counted from its first; they are read from the first to the last,
    and training does not change them."""

    def __init__(self, spec: TableSpec, shard: Shard, like: Mapping[str, Tensor], rows: Int[Tensor, " n"]) -> None:
        self.spec = spec
        """The whole table."""
        self.shard = shard
        """Which rows and columns of it the piece has."""
        self.values = like
        """By name a tensor of the type and the shape that the values of all its rows have."""
        self.rows = rows
        """Those selected, int64 [n]."""

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Which of the selected rows lie in first..stop-1: number of the first, and of the one after the last."""
        begin, end = torch.searchsorted(self.rows, torch.tensor([first, stop])).tolist()
        return begin, end

    @abstractmethod
    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """The selected rows of first..stop-1 by name, on the CPU; not to be written to."""

    @abstractmethod
    def end_reading(self) -> None:
        """They are read no more."""


class CopiedRows(SelectedRows):
    """Rows in memory of their own."""

    def __init__(self, *of: Any, buffers: Mapping[str, Tensor]) -> None:
        """`buffers` [n or more, ...] by name begin with them."""
        super().__init__(*of)
        self.buffers = buffers

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Views."""
        begin, end = self.span(first, stop)
        return {name: value[begin:end] for name, value in self.buffers.items()}

    def end_reading(self) -> None:
        """Their memory is kept for the next ones."""


class FrozenSelection(SelectedRows):
    """Rows of a frozen piece that is read block by block."""

    def __init__(self, *of: Any, read: Callable[[int, int], dict[str, Tensor]], close: Callable[[], None]) -> None:
        super().__init__(*of)
        self._read, self._close = read, close

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Copies; where none of the rows is selected, nothing is read."""
        begin, end = self.span(first, stop)
        if begin == end:
            return {name: value.new_empty((0, *value.shape[1:]), device="cpu") for name, value in self.values.items()}
        here = self.rows[begin:end] - first
        return {name: value[here] for name, value in self._read(first, stop).items()}

    def end_reading(self) -> None:
        self._close()


def room_for(like: Mapping[str, Tensor], num_rows: int, reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Buffers [num_rows or more, ...] by name in the memory of the host, those of `reuse` where they fit."""
    former = reuse.buffers if isinstance(reuse, CopiedRows) else {}
    buffers = {}
    for name, value in like.items():
        room = former.get(name)
        if room is None or not num_rows <= len(room) <= max(MOST_ROOM * num_rows, 1024):
            with torch.inference_mode(False):
                room = empty((int(ROOM * num_rows), *value.shape[1:]), value.dtype, keep=False)
        buffers[name] = room
    return buffers


def copy_rows(values: Mapping[str, Tensor], rows: Int[Tensor, " n"], reuse: SelectedRows | None) -> dict[str, Tensor]:
    """Buffers of `room_for` that begin with copies of some rows of `values`."""
    buffers = room_for(values, len(rows), reuse)
    for name, value in values.items():
        copies = buffers[name][: len(rows)]
        if value.device.type == "cpu":
            torch.index_select(value.detach(), 0, rows, out=copies)
        else:
            copies.copy_(value.detach()[rows.to(value.device)])
    return buffers
