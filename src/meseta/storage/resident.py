"""A shard whose rows and optimizer state lie whole in the memory of the rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, table_key
from meseta.ops.row_marks import RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.storage.selection import CopiedRows, SelectedRows, copy_rows
from meseta.storage.table import ROW, TableStorage, as_stored


@dataclass(frozen=True)
class TableShard(TableStorage):
    """One placed piece of a table on this rank; its tensors are updated in place."""

    spec: TableSpec
    """The whole table."""
    shard: Shard
    """Which rows and columns of it are here."""
    weight: Float[Tensor, "rows columns"]
    """The rows."""
    state: dict[str, Tensor]
    """Optimizer state by name: [rows, columns], or [rows] for what a row has one of.
    Column shards of one table hold equal copies of the latter."""
    optimizer: RowOptimizer
    """What updates the rows."""
    seed: int = 0
    """Key, with the table's name, of the random bits that round 16-bit rows."""

    def __post_init__(self) -> None:
        if ROW in self.state:
            raise MesetaError(f"table {self.spec.name!r}: the state name {ROW!r} is reserved; rename it")

    @staticmethod
    def create(
        spec: TableSpec, shard: Shard, optimizer: RowOptimizer, *, seed: int, device: torch.device | str
    ) -> TableShard:
        """Allocate and fill with the initial values of (seed, table, row, column), whatever the shard's borders."""
        with torch.inference_mode(False):  # Tensors made in inference mode could never be trained.
            weight = initial_rows(spec, rows=shard.rows, columns=shard.columns, seed=seed, device=device)
            state = optimizer.init(weight)
        return TableShard(spec=spec, shard=shard, weight=weight, state=state, optimizer=optimizer, seed=seed)

    @cached_property
    def marks(self) -> RowMarks:  # type: ignore[override]
        """Beside the rows."""
        with torch.inference_mode(False):
            return RowMarks(self.shard.num_rows, self.device)

    @cached_property
    def rows(self) -> TableRows:
        """The shard as the fused update takes it."""
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
        """The tensors themselves."""
        return {ROW: self.weight, **self.state}

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def acquire(self) -> TableRows:
        """`rows`: they lie where operators need them."""
        return self.rows

    def release(self) -> None:
        """Nothing is to be brought back."""

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Views."""
        return {name: value.detach()[first:stop] for name, value in self.values.items()}

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        self.marks.add_range(first, first + max(map(len, values.values()), default=0))
        for name, source in values.items():
            target = as_stored(self.values[name].detach())[first : first + len(source)]
            if target.device.type == "cpu":  # `source` may be read-only, which torch does not take
                np.copyto(target.numpy(), source, casting="no")
            else:
                target.copy_(torch.from_numpy(source.copy()))

    def snapshot(self, reuse: TableStorage | None = None) -> TableShard:
        copy = reuse if isinstance(reuse, TableShard) else self._allocate_host_copy()
        for name, value in self.values.items():
            copy.values[name].copy_(value.detach())
        return copy

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        where = rows.to(self.device)
        return {name: value.detach()[where].cpu() for name, value in self.values.items()}

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> CopiedRows:
        return CopiedRows(self.spec, self.shard, self.values, rows, buffers=copy_rows(self.values, rows, reuse))

    def _allocate_host_copy(self) -> TableShard:
        """A shard of the same shape in the memory of the host."""

        def like(tensor: Tensor) -> Tensor:
            with torch.inference_mode(False):
                return empty(tensor.shape, tensor.dtype, keep=False)

        return replace(self, weight=like(self.weight), state={name: like(t) for name, t in self.state.items()})
