"""Random sharding tasks with tables and ids like those of production models, to evaluate plans and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.measure.synthetic_batches import permute_rows
from meseta.planner.cost.loads import shard_storage_bytes
from meseta.planner.cost.reuse import nonempty_bins
from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, Reuse, TableSpec, Workload

TaskShard = tuple[int, tuple[int, int], tuple[int, int]]
"""Shard as (index of its table in the task, (first row, end row), (first column, end column))."""
DIMS = (4, 8, 16, 32, 64, 128)
MIN_TABLES, MAX_TABLES = 10, 60
MIN_ROWS, MAX_ROWS = 1e3, 1e7
MAX_POOLING_FACTOR = 32.0
BATCH_SIZE = 2048
WINDOW_SAMPLES = 65_536
_EDGES = (0, *(2**i for i in range(16)))
# Shares of rows and of lookups by the number of occurrences of a row in a batch, for 856 and 788 tables like those of
# production models. Source: locality statistics of fbgemm_t856_bs65536, fbgemm_t856_bs65536_0 and
# fbgemm_t788_bs131072_0 in github.com/facebookresearch/dlrm_datasets (MIT). Shares of rows in the later bins are too
# small to be published there.
_ROW_SHARES = (
    (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002),
    (0.423, 0.165, 0.167, 0.121, 0.073, 0.031, 0.011, 0.004, 0.002),
    (0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004),
)
# fmt: off
_LOOKUP_SHARES = (
    (0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.05, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023,
     0.019),
    (0.056, 0.043, 0.075, 0.099, 0.112, 0.091, 0.064, 0.052, 0.049, 0.05, 0.054, 0.058, 0.061, 0.052, 0.038, 0.026,
     0.02),
    (0.027, 0.023, 0.04, 0.068, 0.105, 0.12, 0.099, 0.07, 0.059, 0.054, 0.04, 0.072, 0.064, 0.047, 0.021, 0.017,
     0.076),
)
# fmt: on


def _reuse_histogram(rows: tuple[float, ...], lookups: tuple[float, ...]) -> Reuse:
    # Rows of the first bin occur once. In bins without published shares of rows, a row is assumed to occur sqrt(2)
    # times the lower edge of its bin.
    per_lookup = rows[0] / lookups[0]
    num_published = len(rows)
    rare = [
        lookup_share * per_lookup / (edge * 2**0.5)
        for lookup_share, edge in zip(lookups[num_published:], _EDGES[num_published:], strict=True)
    ]
    shares = [*rows, *rare]
    return Reuse(
        window_samples=WINDOW_SAMPLES,
        edges=_EDGES,
        rows=tuple(share / sum(shares) for share in shares),
        lookups=tuple(share / sum(lookups) for share in lookups),
    )


ID_DISTRIBUTIONS: tuple[Reuse | None, ...] = (
    *(_reuse_histogram(rows, lookups) for rows, lookups in zip(_ROW_SHARES, _LOOKUP_SHARES, strict=True)),
    None,
)
"""Reuse histograms of production tables. The last entry, `None`, means that ids are uniform."""


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """Table of a sharding task, with one feature and sum pooling."""

    num_rows: int
    dim: int
    pooling_factor: float
    """Mean number of ids per bag, at least 1. The number of each bag is rounded up or down at random."""
    distribution_index: int
    """Index of the distribution of ids in ID_DISTRIBUTIONS."""


@dataclass(frozen=True, kw_only=True)
class ShardingTask:
    """Tables to shard, and the batches that they are trained on."""

    seed: int
    """Seed of the random ids."""
    tables: tuple[TaskTable, ...]
    batch_size: int = BATCH_SIZE
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"

    def to_dict(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_dict(document: dict[str, Any]) -> ShardingTask:
        """Create a task from the result of `to_dict`, which may have passed through JSON."""
        return ShardingTask(**{**document, "tables": tuple(TaskTable(**table) for table in document["tables"])})

    @property
    def num_bytes(self) -> int:
        """Size of all tables and their optimizer states in bytes."""
        return sum(
            shard_storage_bytes(table, table.num_embeddings, table.embedding_dim) for table in self.workload().tables
        )

    def workload(self) -> Workload:
        """Convert the task to a workload for the planner, with tables t0, t1, ... and features f0, f1, ..."""
        tables = tuple(
            TableSpec(
                name=f"t{n}",
                num_embeddings=table.num_rows,
                embedding_dim=table.dim,
                dtype=self.dtype,  # type: ignore[arg-type]  # TableSpec rejects unknown types.
                optimizer=OptimizerSpec(name=self.optimizer),
            )
            for n, table in enumerate(self.tables)
        )
        return Workload(
            tables=tables,
            features=tuple(FeatureSpec(name=f"f{n}", table=table.name) for n, table in enumerate(tables)),
            batch_size=self.batch_size,
            loads={
                f"f{n}": FeatureLoad(
                    pooling_factor=table.pooling_factor, reuse=ID_DISTRIBUTIONS[table.distribution_index]
                )
                for n, table in enumerate(self.tables)
            },
        )


def random_task(seed: int, *, max_bytes: float = 12e9) -> ShardingTask:
    """Return the random task of a seed. Tasks that exceed `max_bytes` with optimizer states are drawn again.

    A task has 10 to 60 tables. Each has 1e3 to 1e7 rows (log-uniform), 4 to 128 columns, 1 to 32 ids per sample
    (log-uniform), and the reuse of a production table.
    """
    random = np.random.default_rng([5, seed])
    while True:
        tables = tuple(random_table(random) for _ in range(int(random.integers(MIN_TABLES, MAX_TABLES + 1))))
        task = ShardingTask(seed=seed, tables=tables)
        if task.num_bytes <= max_bytes:
            return task


def random_table(random: np.random.Generator, dims: Sequence[int] = DIMS, distribution: int | None = None) -> TaskTable:
    """Draw a table with one of `dims`. `distribution` indexes ID_DISTRIBUTIONS. `None` draws a production histogram."""
    return TaskTable(
        num_rows=round(float(np.exp(random.uniform(np.log(MIN_ROWS), np.log(MAX_ROWS))))),
        dim=int(random.choice(dims)),
        pooling_factor=float(np.exp(random.uniform(0.0, np.log(MAX_POOLING_FACTOR)))),
        distribution_index=int(random.integers(len(ID_DISTRIBUTIONS) - 1)) if distribution is None else distribution,
    )


def draw_bags(table: TaskTable, batch_size: int, seed: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the (ids [nnz], lengths [B]) of one batch of a table. They depend only on the arguments."""
    random = np.random.default_rng(seed)
    whole = int(table.pooling_factor)
    lengths = whole + (random.random(batch_size) < table.pooling_factor - whole).astype(np.int64)
    count, distribution = int(lengths.sum()), ID_DISTRIBUTIONS[table.distribution_index]
    bins = (
        None
        if distribution is None
        else nonempty_bins(table.num_rows, WINDOW_SAMPLES * table.pooling_factor, distribution)
    )
    # Without a histogram, ids are uniform.
    if bins is None:
        return random.integers(0, table.num_rows, count), lengths
    size, _, share = bins
    stops = np.cumsum(size)
    bin_indices = np.searchsorted(np.cumsum(share)[:-1], random.random(count))
    # Draw a bin by its share of lookups, then a row uniformly within the bin.
    ranks = (stops[bin_indices] - size[bin_indices] * (1.0 - random.random(count))).astype(np.int64)
    return permute_rows(np.clip(ranks, 0, table.num_rows - 1), table.num_rows), lengths


def slice_bags(
    ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (ids, lengths) of the part of a batch within a range of rows. Ids are relative to its first row."""
    inside = (ids >= rows[0]) & (ids < rows[1])
    bags = np.repeat(np.arange(len(lengths)), lengths)
    return ids[inside] - rows[0], np.bincount(bags[inside], minlength=len(lengths))
