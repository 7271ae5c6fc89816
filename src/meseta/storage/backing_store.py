"""Where rows lie that are not near: records by row, read and written some at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Bool, Int, Shaped
from meseta.ops.memory import empty
from meseta.ops.row_cache import memory_backing_store
from meseta.ops.row_file import RowFileSnapshot
from meseta.spec import MesetaError


@runtime_checkable  # beartype asks for it where the tests check every call
class PendingRead(Protocol):
    """A read on its way."""

    def wait(self) -> Bool[Tensor, " n"]:
        """Wait for it: which of the rows were ever written; records of others mean nothing. Raises MesetaError where
        the rows cannot be had."""


@runtime_checkable  # beartype asks for it where the tests check every call
class BackingStoreSnapshot(Protocol):
    """Rows as they were at one moment."""

    def read(self, first: int, stop: int) -> tuple[Sequence[Shaped[Tensor, "n _"]], Bool[Tensor, " n"]]:
        """Records of rows first..stop-1, uint8 [n, bytes], in one piece or cut into values, and which of the rows were
        ever written; only those of others may be written to. Raises MesetaError where they cannot be had."""

    def close(self) -> None:
        """They are needed no longer."""


@runtime_checkable  # beartype asks for it where the tests check every call
class BackingStore(Protocol):
    """Records of rows 0..n-1, uint8, in the memory of the host or on a disk. One that was never written is absent."""

    @property
    def handle(self) -> object:
        """What meseta.ops.row_cache takes."""

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Read from a disk, and written to it, so far."""

    def explain(self, failure: Sequence[int]) -> MesetaError:
        """What to say of a failure that the cache was told of."""

    def read(self, rows: Int[Tensor, " n"], out: Shaped[Tensor, "n bytes"]) -> PendingRead:
        """Begin to read rows into `out`, which is left alone until that is waited for; what was written before is
        seen."""

    def write(self, rows: Int[Tensor, " n"], *values: Tensor | NDArray[np.uint8]) -> None:
        """Put rows with their values, uint8 [n, bytes] each, which are copied; side by side they are records. Raises
        MesetaError where they cannot be kept; then none is lost that was there before."""

    def snapshot(self) -> BackingStoreSnapshot | RowFileSnapshot:
        """The rows as they are now, whatever is written later."""


class _CompletedRead:
    """A read that took no time."""

    def __init__(self, present: Tensor) -> None:
        self._is_written = present

    def wait(self) -> Tensor:
        return self._is_written


class HostBackingStore:
    """Rows in the memory of the host; a page that no row was written to takes none."""

    def __init__(self, num_rows: int, record_bytes: int) -> None:
        self._records = empty((num_rows, record_bytes), torch.uint8, keep=False)
        self._is_written = torch.zeros(num_rows, dtype=torch.bool)
        self.handle: object = memory_backing_store(self._records, self._is_written)
        self.disk_bytes = (0, 0)

    def explain(self, failure: Sequence[int]) -> MesetaError:
        """Memory does not fail."""
        return MesetaError(f"rows in the memory of the host cannot be had: {list(failure)}")

    def read(self, rows: Tensor, out: Tensor) -> _CompletedRead:
        torch.index_select(self._records, 0, rows, out=out)
        return _CompletedRead(self._is_written[rows])

    def write(self, rows: Tensor, *values: Tensor | NDArray[np.uint8]) -> None:
        self._records.numpy()[rows.numpy()] = np.concatenate(values, axis=1)
        self._is_written[rows] = True

    def snapshot(self) -> HostBackingStoreSnapshot:
        return HostBackingStoreSnapshot(self._records.clone(), self._is_written.clone())


class HostBackingStoreSnapshot:
    """A copy of them."""

    def __init__(self, records: Tensor, is_present: Tensor) -> None:
        self._records, self._is_written = records, is_present

    def read(self, first: int, stop: int) -> tuple[Sequence[Tensor], Tensor]:
        return [self._records[first:stop]], self._is_written[first:stop]

    def close(self) -> None:
        self._records = self._records[:0]
