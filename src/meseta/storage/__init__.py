"""Where rows live. One tier so far: the memory of the rank's device."""

from __future__ import annotations

import torch

from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.spec import Shard, TableSpec
from meseta.storage.resident import TableShard
from meseta.storage.table import ROW, Lease, TableStorage, as_stored

__all__ = ["ROW", "Lease", "TableShard", "TableStorage", "as_stored", "make_storage"]


def make_storage(
    spec: TableSpec, shard: Shard, optimizer: RowOptimizer, *, seed: int, device: torch.device | str
) -> TableStorage:
    """Place a new piece of a table, with the initial values of (seed, table, row, column)."""
    return TableShard.create(spec, shard, optimizer, seed=seed, device=device)
