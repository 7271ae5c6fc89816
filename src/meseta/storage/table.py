"""The seam between rows and all that uses them: operators borrow them, everything else reads and writes them here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.row_marks import Consumer, RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.spec import Shard, TableSpec
from meseta.storage.selection import LazyRows, SelectedRows

ROW = "row"
"""Name of the rows among the optimizer's states."""


class TableStorage(ABC):
    """One placed piece of a table on this rank, wherever its rows and their state are kept.

    A row has values by name: ROW [columns], and the optimizer's states, [columns] or one number. Rows are counted from
    the first of the piece.
    """

    spec: TableSpec
    """The whole table."""
    shard: Shard
    """Which rows and columns of it are here."""
    optimizer: RowOptimizer
    """What updates the rows."""
    seed: int
    """Key, with the table's name, of the random bits that round 16-bit rows."""
    marks: RowMarks
    """Which rows were changed, by a step or by `write`, since each consumer asked."""

    def take_changed_rows(self, consumer: Consumer) -> Int[Tensor, " n"]:
        """Rows that were changed since this consumer asked, ascending; they are marked for it no longer.

        To be called while no operator steps rows. Where it fails, `marks.add(rows, consumer)` gives them back.
        """
        rows = self.marks.marked_rows(consumer)
        self.marks.clear(consumer)
        return rows

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Tensor]:
        """By name a tensor of the type and the shape that the values of all rows have; its numbers mean nothing."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where operators borrow the rows."""

    @abstractmethod
    def acquire(self) -> TableRows:
        """Lend the rows to operators, which read them and step them in place, until as many `end` have come. The same
        record every time while any is lent."""

    @abstractmethod
    def release(self) -> None:
        """Undo one `begin`; what operators have written is the table's."""

    is_offloaded: bool = False
    """Whether rows are lent only while they are pinned, in places that are told then; else all are, each at its own."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Of what `freeze` or `in_order` have made: it is read no more, until it is given to `freeze` again."""

    @abstractmethod
    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Rows first..stop-1 by name, on any device. Not to be written to; may be what lies there, not a copy."""

    @abstractmethod
    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Put consecutive rows from `first` on; of a name that is not given what is there stays. Bits are copied:
        arrays have the type of the values, bfloat16 as uint16, see `as_stored`."""

    @abstractmethod
    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        """A copy in the memory of the host, which training does not change. `reuse` is one that was made before and is
        needed no longer."""

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> SelectedRows:
        """Some rows, which training does not change. `reuse` is one that was made before and is needed no longer."""
        return self.snapshot().select_in_place(rows)

    def select_in_place(self, rows: RowSet) -> SelectedRows:
        """Some rows, to be read from the first to the last while nothing changes them; no copy of them is kept."""

        def read(first: int, stop: int) -> dict[str, Tensor]:
            return self.gather(rows.rows(first, stop))

        return LazyRows(self.spec, self.shard, self.values, rows, read=read, close=self.close)

    def sequential_view(self) -> TableStorage:
        """The rows, to be read from the first to the last while nothing changes them, until `close`."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.values[ROW].dtype

    def num_bytes(self) -> int:
        """Of all rows and states, once."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    @abstractmethod
    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        """Copies of some rows, ascending, by name, in the memory of the host."""


def from_stored(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The way back, of an array that can be written to; a view."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def as_stored(tensor: Tensor) -> Tensor:
    """The same bits in a type that numpy and files have; a view."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
