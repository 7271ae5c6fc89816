"""A shard whose rows and optimizer state lie whole in the memory of the rank's device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meseta.jagged.shapes import Float
from meseta.ops.random_rows import initial_rows, table_key
from meseta.ops.row_optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.spec import Shard, TableSpec


@dataclass(frozen=True)
class TableShard:
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

    @cached_property
    def rows(self) -> TableRows:
        """The shard as the fused update takes it."""
        return TableRows(
            weight=self.weight,
            state=self.state,
            key=table_key(self.seed, f"{self.spec.name}/rounding"),
            first_row=self.shard.rows[0],
            first_column=self.shard.columns[0],
        )

    @staticmethod
    def create(
        spec: TableSpec, shard: Shard, optimizer: RowOptimizer, *, seed: int, device: torch.device | str
    ) -> TableShard:
        """Allocate and fill with the initial values of (seed, table, row, column), whatever the shard's borders."""
        with torch.inference_mode(False):  # Tensors made in inference mode could never be trained.
            weight = initial_rows(spec, rows=shard.rows, columns=shard.columns, seed=seed, device=device)
            state = optimizer.init(weight)
        return TableShard(spec=spec, shard=shard, weight=weight, state=state, optimizer=optimizer, seed=seed)
