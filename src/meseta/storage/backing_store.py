"""Byte layout of the records in a backing store. A record is one row and its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.memory import empty
from meseta.ops.row_cache import memory_backing_store
from meseta.ops.row_file import RowFileSnapshot
from meseta.sparse.shapes import Bool, Int, Shaped
from meseta.spec import MesetaError


# A record has the values in the order of their names, without padding:
#
#     | row [columns] | state [columns] | ... | state with one number per row | ... |
class _Field(NamedTuple):
    first: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the value of one row: (columns,), or () for one number per row."""


class RecordLayout:
    """Conversion between named values of rows and records."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        """Derive the layout from the dtypes and shapes of `values` [rows, ...]. Their device and contents do not
        matter."""
        self._fields: dict[str, _Field] = {}
        first = 0
        for name, value in values.items():
            shape = tuple(value.shape[1:])
            stop = first + prod(shape) * value.element_size()
            self._fields[name] = _Field(first, stop, value.dtype, shape)
            first = stop
        self.num_bytes = first

    @property
    def widths(self) -> list[int]:
        """Size of each value of a record in bytes."""
        return [field.stop - field.first for field in self._fields.values()]

    def to_bytes(self, values: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8]]:
        """Return each value of n rows as uint8 [n, bytes]. Concatenated on axis 1, they are the records.

        Arrays must have the dtypes of `as_stored`. Contiguous arrays are not copied.
        """
        arrays = [values[name].reshape(-1, prod(field.shape)) for name, field in self._fields.items()]
        return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]

    def from_bytes(self, columns: Sequence[Shaped[Tensor, "n _"]]) -> dict[str, Tensor]:
        """Return the named values of n rows, given whole records or the result of `to_bytes`.

        Contiguous tensors are not copied.
        """
        values = {}
        if len(columns) == 1:
            columns = columns[0].split(self.widths, dim=1)
        for column, (name, field) in zip(columns, self._fields.items(), strict=True):
            contiguous = column if column.is_contiguous() else empty(column.shape, torch.uint8).copy_(column)
            values[name] = contiguous.view(field.dtype).view(len(column), *field.shape)
        return values


@runtime_checkable  # required by beartype, with which tests check calls
class PendingRead(Protocol):
    """Asynchronous read of records."""

    def wait(self) -> Bool[Tensor, " n"]:
        """Wait for the read, and return which rows have ever been written. Raises MesetaError if the read failed.

        The contents of records of unwritten rows are undefined.
        """


@runtime_checkable
class BackingStoreSnapshot(Protocol):
    """Read-only view of a backing store at one point in time."""

    def read(self, first: int, stop: int) -> tuple[Sequence[Shaped[Tensor, "n _"]], Bool[Tensor, " n"]]:
        """Return (records, is_written) of rows first..stop-1.

        Records are uint8 [n, bytes], as one tensor or as one tensor per value. The caller may overwrite the records of
        unwritten rows only. Raises MesetaError if the read failed.
        """

    def close(self) -> None:
        """Release the resources of the snapshot."""


@runtime_checkable
class BackingStore(Protocol):
    """Records (uint8) of rows 0..n-1 in host memory or on disk."""

    @property
    def handle(self) -> object:
        """Native handle for `meseta.ops.row_cache.RowCache`."""

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Total bytes (read from disk, written to disk)."""

    def explain(self, failure: Sequence[int]) -> MesetaError:
        """Return the error for a failure code that the row cache reported."""

    def read(self, rows: Int[Tensor, " n"], out: Shaped[Tensor, "n bytes"]) -> PendingRead:
        """Start to read the records of `rows` into `out`. The read sees all earlier writes.

        `out` must not be accessed until the read is complete.
        """

    def write(self, rows: Int[Tensor, " n"], *values: Tensor | NDArray[np.uint8]) -> None:
        """Copy `values`, uint8 [n, bytes] each, into the records of `rows`. Concatenated on axis 1, they are records.

        Raises MesetaError if the write failed. Rows that were written before are not lost then.
        """

    def snapshot(self) -> BackingStoreSnapshot | RowFileSnapshot:
        """Return a snapshot of the current records, which later writes do not change."""


class _CompletedRead:
    """Result of a synchronous read."""

    def __init__(self, present: Tensor) -> None:
        self._is_written = present

    def wait(self) -> Tensor:
        return self._is_written


class HostBackingStore:
    """Backing store in host memory."""

    def __init__(self, num_rows: int, record_bytes: int) -> None:
        # The OS commits pages at the first write, so a page without written rows takes no memory.
        self._records = empty((num_rows, record_bytes), torch.uint8, keep=False)
        self._is_written = torch.zeros(num_rows, dtype=torch.bool)
        self.handle: object = memory_backing_store(self._records, self._is_written)
        self.disk_bytes = (0, 0)

    def explain(self, failure: Sequence[int]) -> MesetaError:
        # Host memory reports no failures.
        return MesetaError(f"host backing store: unexpected failure {list(failure)}; please report this as a bug")

    def read(self, rows: Tensor, out: Tensor) -> _CompletedRead:
        torch.index_select(self._records, 0, rows, out=out)
        return _CompletedRead(self._is_written[rows])

    def write(self, rows: Tensor, *values: Tensor | NDArray[np.uint8]) -> None:
        self._records.numpy()[rows.numpy()] = np.concatenate(values, axis=1)
        self._is_written[rows] = True

    def snapshot(self) -> HostBackingStoreSnapshot:
        return HostBackingStoreSnapshot(self._records.clone(), self._is_written.clone())


class HostBackingStoreSnapshot:
    """Copy of the records of a `HostBackingStore`."""

    def __init__(self, records: Tensor, is_present: Tensor) -> None:
        self._records, self._is_written = records, is_present

    def read(self, first: int, stop: int) -> tuple[Sequence[Tensor], Tensor]:
        return [self._records[first:stop]], self._is_written[first:stop]

    def close(self) -> None:
        self._records = self._records[:0]
