"""Synthetic workloads and batches for benchmarks."""

# This module imports only NumPy. Interpreters of other systems load it, and the rest of Meseta may be missing there.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ZIPF_EXPONENT = 1.05
FOOTPRINT_BYTES = 256_000_000
_HASH_MULTIPLIER = 2_654_435_761  # The multiplicative hash constant of Knuth, a prime.


@dataclass(frozen=True, kw_only=True)
class LookupWorkload:
    """Tables with one feature each, and the distribution of their ids."""

    name: str
    rows: tuple[int, ...]
    """Number of rows of each table."""
    dims: tuple[int, ...]
    """Embedding dimension of each table."""
    batch_size: int
    bag_size: int
    """Number of ids per bag. If `ragged`, the mean."""
    id_distribution: Literal["zipf", "uniform"]
    """Distribution of the ids over the rows of a table."""
    pooling: Literal["sum", "mean"] = "sum"
    weighted: bool = False
    """Whether each id has a weight."""
    ragged: bool = False
    """Whether the number of ids per bag is uniform in 0..2 * bag_size, instead of always `bag_size`."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> LookupWorkload:
        """Create a workload from a decoded JSON document, which `dataclasses.asdict` produced."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
        return LookupWorkload(**fields)

    @property
    def num_ids(self) -> int:
        """Number of ids in one batch. If `ragged`, the mean."""
        return len(self.rows) * self.batch_size * self.bag_size

    @property
    def num_elements(self) -> int:
        """Number of elements of all tables."""
        return sum(rows * dim for rows, dim in zip(self.rows, self.dims, strict=True))

    @property
    def num_batches(self) -> int:
        """Number of distinct batches, 4 to 64. If possible, they read at least FOOTPRINT_BYTES of float32 rows."""
        batch_bytes = 4 * self.batch_size * self.bag_size * sum(self.dims)
        return min(max(math.ceil(FOOTPRINT_BYTES / batch_bytes), 4), 64)


@dataclass(frozen=True)
class IdBatch:
    """Ids of all features of a batch, grouped by feature."""

    ids: NDArray[np.int64]
    """Ids [nnz]."""
    lengths: NDArray[np.int64]
    """Number of ids per bag [F * B]."""
    weights: NDArray[np.float32] | None
    """Weight of each id [nnz], or `None` if the workload has no weights."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Index of the first id of each bag, then the number of ids [F * B + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


@dataclass(frozen=True, kw_only=True)
class DlrmWorkload:
    """Shape of a DLRM (arXiv 1906.00091) and of its training batches."""

    lookups: LookupWorkload
    """Tables and ids of the model."""
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    """Hidden widths of the top MLP, without its single output."""
    num_dense: int = 13

    @staticmethod
    def from_json(document: dict[str, Any]) -> DlrmWorkload:
        """Create a workload from a decoded JSON document, which `dataclasses.asdict` produced."""
        return DlrmWorkload(
            lookups=LookupWorkload.from_json(document["lookups"]),
            bottom_mlp=tuple(document["bottom_mlp"]),
            top_mlp=tuple(document["top_mlp"]),
            num_dense=document["num_dense"],
        )

    @property
    def name(self) -> str:
        return self.lookups.name

    @property
    def dim(self) -> int:
        """Embedding dimension of all tables."""
        return self.lookups.dims[0]


@dataclass(frozen=True)
class TrainingBatch:
    """Slice of a training batch for one rank."""

    dense: NDArray[np.float32]
    """Dense features [B, num_dense]."""
    ids: NDArray[np.int64]
    """Ids [F, B, bag_size]."""
    label: NDArray[np.float32]
    """Labels [B], 1 with probability 0.25, else 0."""


def make_training_batches(training: DlrmWorkload, rank: int = 0, num_ranks: int = 1) -> list[TrainingBatch]:
    """Return the slices of `rank` for all batches of a benchmark. Bags must not be ragged.

    Each batch is divided evenly over the ranks. Their number is `LookupWorkload.num_batches`.
    """
    traffic, random = training.lookups, np.random.default_rng(2)
    share = slice(rank * traffic.batch_size // num_ranks, (rank + 1) * traffic.batch_size // num_ranks)
    samples = []
    for batch in make_id_batches(traffic, traffic.num_batches):
        dense = random.standard_normal((traffic.batch_size, training.num_dense), dtype=np.float32)
        label = (random.random(traffic.batch_size) < 0.25).astype(np.float32)
        ids = batch.ids.reshape(len(traffic.rows), traffic.batch_size, traffic.bag_size)
        samples.append(TrainingBatch(dense=dense[share], ids=np.ascontiguousarray(ids[:, share]), label=label[share]))
    return samples


def make_id_batches(traffic: LookupWorkload, num_batches: int, seed: int = 1) -> list[IdBatch]:
    """Generate `num_batches` batches. They are identical in every process."""
    random = np.random.default_rng(seed)
    return [_make_id_batch(traffic, random) for _ in range(num_batches)]


def _make_id_batch(traffic: LookupWorkload, random: np.random.Generator) -> IdBatch:
    num_bags = len(traffic.rows) * traffic.batch_size
    if traffic.ragged:
        lengths = random.integers(0, 2 * traffic.bag_size + 1, num_bags)
    else:
        lengths = np.full(num_bags, traffic.bag_size, np.int64)
    counts = lengths.reshape(len(traffic.rows), -1).sum(axis=1)
    draw = zipf_ids if traffic.id_distribution == "zipf" else uniform_ids
    ids = np.concatenate([draw(random, int(n), rows) for n, rows in zip(counts, traffic.rows, strict=True)])
    weights = random.random(len(ids), dtype=np.float32) if traffic.weighted else None
    return IdBatch(ids=ids, lengths=lengths, weights=weights)


def uniform_ids(random: np.random.Generator, count: int, num_rows: int) -> NDArray[np.int64]:
    """Draw `count` row ids uniformly, as int64 in 0..num_rows-1."""
    return random.integers(0, num_rows, count, dtype=np.int64)


def zipf_ids(random: np.random.Generator, count: int, num_rows: int) -> NDArray[np.int64]:
    """Draw `count` row ids from a Zipf distribution with exponent 1.05, as int64 in 0..num_rows-1."""
    # A continuous variable x on [1, num_rows + 1) with density proportional to x^-1.05, rounded down, is a rank.
    uniform = random.random(count)
    rest = 1.0 - ZIPF_EXPONENT
    x = (1.0 + uniform * ((num_rows + 1.0) ** rest - 1.0)) ** (1.0 / rest)  # Inverse of the cumulative distribution.
    ranks = np.clip(x.astype(np.int64) - 1, 0, num_rows - 1)
    # Frequent rows must not be neighbors in the table.
    return permute_rows(ranks, num_rows)


def permute_rows(ranks: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Map `ranks` to row ids by a fixed permutation of 0..num_rows-1."""
    factor = _HASH_MULTIPLIER
    while math.gcd(factor, num_rows) != 1:
        factor += 2
    return ranks * (factor % num_rows) % num_rows
