"""Interface of table storage. Operators update rows in place. All other code reads and writes copies."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, table_key
from meseta.ops.row_marks import Consumer, RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.storage.selection import CopiedRows, LazyRows, SelectedRows, copy_rows

ROW = "row"
"""Name of the embedding row in mappings that also contain optimizer states."""


class TableStorage(ABC):
    """Shard of a table on this rank, with its optimizer states.

    A row has named values: `ROW` [columns] and optimizer states, which are [columns] or one number. Row indices are
    relative to the first row of the shard.
    """

    spec: TableSpec
    shard: Shard
    """Rows and columns of the table that this storage holds."""
    optimizer: RowOptimizer
    seed: int
    """Seed of stochastic rounding to 16-bit rows, combined with the name of the table."""
    marks: RowMarks
    """Rows changed by a step or by `write`, for each consumer."""

    def take_changed_rows(self, consumer: Consumer) -> Int[Tensor, " n"]:
        """Return the rows changed since the previous call for `consumer`, in ascending order, and clear their marks.

        No operator may update rows during the call. A consumer that fails to process the rows restores the marks with
        `marks.add(rows, consumer)`.
        """
        rows = self.marks.marked_rows(consumer)
        self.marks.clear(consumer)
        return rows

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Tensor]:
        """Tensors with the dtype and shape of each value for all rows, by name. Their contents are undefined."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which operators access the rows."""

    @abstractmethod
    def acquire(self) -> TableRows:
        """Return the rows for operators to read and update in place, until the matching `release`.

        Calls may nest. Until the last `release`, each call returns the same object.
        """

    @abstractmethod
    def release(self) -> None:
        """Undo one `acquire`. Updates of operators are kept."""

    is_offloaded: bool = False
    """Whether operators access a row only while it is pinned, in the cache slot that pinning returned. Otherwise all
    rows are accessible at their own indices."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Release a storage that `snapshot` or `sequential_view` returned. It may only be passed to `snapshot`
        again."""

    @abstractmethod
    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Return rows first..stop-1 by name, on any device. The tensors may be views. Do not modify them."""

    @abstractmethod
    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Copy `values` into consecutive rows from row `first`. Values that are not passed remain unchanged.

        Arrays must have the dtypes of `as_stored`, such as uint16 for bfloat16.
        """

    @abstractmethod
    def scatter(self, rows: Int[Tensor, " n"], values: Mapping[str, NDArray[Any]]) -> None:
        """Copy `values` into `rows`, as `write` does. The rows must be in host memory and in ascending order."""

    @abstractmethod
    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        """Return a snapshot of all rows, which training does not change.

        `reuse` is an earlier snapshot that is no longer needed. Its memory may be reused.
        """

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> SelectedRows:
        """Return a snapshot of `rows`. `reuse` is an earlier selection, whose memory may be reused."""
        return self.snapshot().select_in_place(rows)

    def select_in_place(self, rows: RowSet) -> SelectedRows:
        """Return a selection of `rows` without copying them all. The rows must not change until it was read."""

        def read(first: int, stop: int) -> dict[str, Tensor]:
            return self.gather(rows.rows(first, stop))

        return LazyRows(self.spec, self.shard, self.values, rows, read=read, close=self.close)

    def sequential_view(self) -> TableStorage:
        """Return a storage for fast reading in row order. The rows must not change until its `close`."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows. Optimizer states may have other dtypes."""
        return self.values[ROW].dtype

    def num_bytes(self) -> int:
        """Return the size of all rows and optimizer states, without caches and indices."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    @abstractmethod
    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        """Return copies of `rows` by name, in host memory. The rows must be in ascending order."""


class PendingFetch(ABC):
    """Asynchronous fetch of rows into the caches of offloaded shards. They stay pinned until `release`."""

    slots: Sequence[Int[Tensor, " _"]]
    """Cache slot of each row (int64, on the CPU), one tensor per lookup."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all rows are in their slots. If the fetch failed, each call raises MesetaError."""

    @abstractmethod
    def release(self) -> None:
        """Unpin the rows."""


class Lease:
    """Access to the rows of some shards for one batch, until `release` or garbage collection."""

    def __init__(self, shards: Sequence[TableStorage], fetch: PendingFetch | None = None) -> None:
        self._fetch = fetch
        self._acquired: Sequence[TableStorage] = ()
        self.slots = () if fetch is None else fetch.slots
        """Index of each fetched row in the tensors of `rows`, one tensor per lookup."""
        self.rows = tuple(shard.acquire() for shard in shards)
        """Rows and optimizer states of each shard, as operators take them."""
        self._acquired = shards

    def wait(self) -> None:
        """Wait for the fetch. Raises MesetaError if it failed."""
        if self._fetch is not None:
            self._fetch.wait()

    def release(self) -> None:
        """Unpin the rows and release all shards. Further calls do nothing."""
        acquired, self._acquired = self._acquired, ()
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.release()
        for shard in acquired:
            shard.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # Module globals may be gone at the exit of the interpreter.
            self.release()


def from_stored(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a view of a writable array as a tensor of `dtype`. Inverse of `as_stored`."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def as_stored(tensor: Tensor) -> Tensor:
    """Return a view with the same bits in a dtype that numpy and files support, such as uint16 for bfloat16."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


@dataclass(frozen=True)
class TableShard(TableStorage):
    """Shard in device memory. Operators update its tensors in place."""

    spec: TableSpec
    shard: Shard
    """Rows and columns of the table that this shard holds."""
    weight: Float[Tensor, "rows columns"]
    state: dict[str, Tensor]
    """Optimizer states by name, [rows, columns] or [rows]. Column shards of a table have equal copies of the latter."""
    optimizer: RowOptimizer
    seed: int = 0
    """Seed of stochastic rounding to 16-bit rows, combined with the name of the table."""

    def __post_init__(self) -> None:
        if ROW in self.state:
            raise MesetaError(f"table {self.spec.name!r}: optimizer state name {ROW!r} is reserved; rename the state")

    @staticmethod
    def create(
        spec: TableSpec, shard: Shard, optimizer: RowOptimizer, *, seed: int, device: torch.device | str
    ) -> TableShard:
        """Allocate a shard and initialize its rows.

        The initial value of an element depends on (seed, table, row, column) only, and not on the sharding.
        """
        with torch.inference_mode(False):  # Inference tensors could not be updated in place later.
            weight = initial_rows(spec, rows=shard.rows, columns=shard.columns, seed=seed, device=device)
            state = optimizer.init(weight)
        return TableShard(spec=spec, shard=shard, weight=weight, state=state, optimizer=optimizer, seed=seed)

    @cached_property
    def marks(self) -> RowMarks:  # type: ignore[override]
        """Rows changed by a step or by `write`, for each consumer. Stored on the device of the rows."""
        with torch.inference_mode(False):
            return RowMarks(self.shard.num_rows, self.device)

    @cached_property
    def rows(self) -> TableRows:
        """Argument of fused updates for this shard."""
        return TableRows(
            weight=self.weight,
            state=self.state,
            key=table_key(self.seed, f"{self.spec.name}/rounding"),
            first_row=self.shard.rows[0],
            first_column=self.shard.columns[0],
            marks=self.marks.words_and_log,
        )

    @property
    def values(self) -> Mapping[str, Tensor]:
        """Row and optimizer state tensors of this shard, without copies."""
        return {ROW: self.weight, **self.state}

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def acquire(self) -> TableRows:
        return self.rows

    def release(self) -> None:
        pass  # Operators update the tensors themselves.

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        return {name: value.detach()[first:stop] for name, value in self.values.items()}

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        self.marks.add_range(first, first + max(map(len, values.values()), default=0))
        for name, source in values.items():
            target = as_stored(self.values[name].detach())[first : first + len(source)]
            if target.device.type == "cpu":  # `source` may be read-only, which torch tensors cannot be.
                np.copyto(target.numpy(), source, casting="no")
            else:
                target.copy_(torch.from_numpy(source.copy()))

    def scatter(self, rows: Int[Tensor, " n"], values: Mapping[str, NDArray[Any]]) -> None:
        self.marks.add(rows)
        for name, source in values.items():
            target = as_stored(self.values[name].detach())
            if target.device.type == "cpu":
                target.numpy()[rows.numpy()] = source
            else:
                target[rows.to(target.device)] = torch.from_numpy(source.copy()).to(target.device)

    def snapshot(self, reuse: TableStorage | None = None) -> TableShard:
        copy = reuse if isinstance(reuse, TableShard) else self._allocate_host_copy()
        for name, value in self.values.items():
            copy.values[name].copy_(value.detach())
        return copy

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        indices = rows.to(self.device)
        return {name: value.detach()[indices].cpu() for name, value in self.values.items()}

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> CopiedRows:
        return CopiedRows(self.spec, self.shard, self.values, rows, buffers=copy_rows(self.values, rows, reuse))

    def _allocate_host_copy(self) -> TableShard:

        def empty_on_host(tensor: Tensor) -> Tensor:
            with torch.inference_mode(False):
                return empty(tensor.shape, tensor.dtype, keep=False)

        return replace(
            self, weight=empty_on_host(self.weight), state={name: empty_on_host(t) for name, t in self.state.items()}
        )
