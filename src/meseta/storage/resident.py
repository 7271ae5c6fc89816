"""Shards in the memory of the rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, table_key
from meseta.ops.row_marks import RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.storage.selection import CopiedRows, SelectedRows, copy_rows
from meseta.storage.table import ROW, TableStorage, as_stored


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
