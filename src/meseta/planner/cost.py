"""Bytes that one sample moves through a table, and bytes that the table takes: all that the simple planner knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meseta.spec import FeatureSpec, MesetaError, ShardingType, TableSpec, nearest

ID_BYTES = 8
"""One id on the wire."""
WEIGHT_BYTES = 4
"""The weight of one id on the wire."""
STEP_SAMPLES = 2048
"""Samples of a step, where bytes move once per step: the gradients of replicated tables."""


def value_bytes(table: TableSpec) -> int:
    """Bytes of one number of a row, as it is stored."""
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[table.dtype]


def compute_bytes(table: TableSpec) -> int:
    """Bytes of one number of what is computed from rows: bags, gradients, optimizer state."""
    return 8 if table.dtype == "float64" else 4


def state_bytes_per_row(table: TableSpec) -> int:
    """Bytes of optimizer state beside one row."""
    per_element, per_row = table.optimizer.num_states
    return (per_element * table.embedding_dim + per_row) * compute_bytes(table)


def cell_bytes(table: TableSpec, num_rows: int, num_columns: int) -> int:
    """Bytes of a shard of `num_rows` x `num_columns` with its optimizer state, rounded up."""
    row_bytes = table.embedding_dim * value_bytes(table) + state_bytes_per_row(table)
    return math.ceil(num_rows * row_bytes * num_columns / table.embedding_dim)


def table_bytes(table: TableSpec) -> int:
    """Bytes of the whole table with its optimizer state."""
    return cell_bytes(table, table.num_embeddings, table.embedding_dim)


class SampleCost:
    """Predicted bytes per sample of one table under each scheme, from its features and their mean pooling factors."""

    def __init__(
        self, table: TableSpec, features: Sequence[FeatureSpec], pooling_factors: Mapping[str, float], num_ranks: int
    ) -> None:
        """Collect the features of `table`; a feature without a pooling factor has one id per sample."""
        row_bytes = table.embedding_dim * value_bytes(table)
        mine = [
            (feature, pooling_factors.get(feature.name, 1.0)) for feature in features if feature.table == table.name
        ]
        num_ids = sum(factor for _, factor in mine)
        self._ids_bytes = sum(factor * (ID_BYTES + WEIGHT_BYTES * feature.weighted) for feature, factor in mine)
        sent_bytes = 2 * table.embedding_dim * compute_bytes(table)
        self._bags_bytes = sent_bytes * sum(feature.pooling != "none" for feature, _ in mine)
        self._rows_bytes = sent_bytes * sum(factor for feature, factor in mine if feature.pooling == "none")
        # A row is read in the forward pass, read and written in the update, and so is its state in the update.
        num_moves = 1 if table.optimizer.name == "frozen" else 3
        self._memory_bytes = num_ids * (num_moves * row_bytes + 2 * state_bytes_per_row(table))
        self._gradient_bytes = table.num_embeddings * (table.embedding_dim + 1) * compute_bytes(table)
        self._num_ranks = num_ranks
        self.is_pooled = all(feature.pooling != "none" for feature, _ in mine)
        """Whether no feature asks for rows one by one."""

    def exchanged_bytes(self, sharding: ShardingType, num_parts: int) -> float:
        """Ids to the owners; rows or bags back, and their gradients; 0 on one rank.

        Every row shard returns a bag of its own, so bags grow with the parts; every column shard needs all the ids;
        replicas exchange no ids or bags, but add the gradient of the whole table and a mark per row over ranks, once
        per step of STEP_SAMPLES samples.
        """
        if self._num_ranks == 1:
            return 0.0
        if sharding is ShardingType.ROW_WISE:
            total = self._ids_bytes + self._rows_bytes + self._bags_bytes * num_parts
        elif sharding is ShardingType.COLUMN_WISE:
            total = self._ids_bytes * num_parts + self._rows_bytes + self._bags_bytes
        elif sharding is ShardingType.DATA_PARALLEL:
            total = 2 * self._gradient_bytes * self._num_ranks / STEP_SAMPLES
        else:
            total = self._ids_bytes + self._rows_bytes + self._bags_bytes
        return total * (self._num_ranks - 1) / self._num_ranks

    def total_bytes(self, sharding: ShardingType, num_parts: int = 1) -> float:
        """Bytes read, written and exchanged, summed over ranks; every replica updates its own copy of a row."""
        copies = self._num_ranks if sharding is ShardingType.DATA_PARALLEL else 1
        return self._memory_bytes * copies + self.exchanged_bytes(sharding, num_parts)


def check_pooling_factors(pooling_factors: Mapping[str, float], features: Sequence[FeatureSpec]) -> None:
    """Raise MesetaError for a feature that does not exist, or a factor that is not a finite number from 0 up."""
    known = [feature.name for feature in features]
    for name, factor in pooling_factors.items():
        if name not in known:
            raise MesetaError(f"planner: pooling factor for unknown feature {name!r}; {nearest(name, known)}")
        if not (math.isfinite(factor) and factor >= 0.0):
            raise MesetaError(
                f"planner: the pooling factor of feature {name!r} must be finite and not negative, got {factor}"
            )
