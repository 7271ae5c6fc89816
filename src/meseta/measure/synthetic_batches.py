"""Ids for benchmarks: which tables, how many ids a bag, how skewed. numpy alone, since other systems' interpreters
load it too, where nothing else of this package may be installed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ZIPF_EXPONENT = 1.05
FOOTPRINT_BYTES = 256_000_000
"""Rows that the batches of one benchmark read together: well above any cache."""
_HASH_MULTIPLIER = 2_654_435_761  # Knuth's multiplicative constant, a prime


@dataclass(frozen=True, kw_only=True)
class LookupWorkload:
    """Tables, one feature each, and the ids that visit them."""

    name: str
    rows: tuple[int, ...]
    """Rows of each table."""
    dims: tuple[int, ...]
    """Columns of each table."""
    batch_size: int
    bag_size: int
    """Ids of each bag; the mean, where `ragged`."""
    id_distribution: Literal["zipf", "uniform"]
    """How ids are spread over a table."""
    pooling: Literal["sum", "mean"] = "sum"
    weighted: bool = False
    """Whether each id has a weight."""
    ragged: bool = False
    """Whether bags have 0 to 2 * bag_size ids instead of bag_size."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> LookupWorkload:
        """The inverse of dataclasses.asdict after a trip through JSON."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
        return LookupWorkload(**fields)

    @property
    def num_ids(self) -> int:
        """Ids of one batch; the mean, where `ragged`."""
        return len(self.rows) * self.batch_size * self.bag_size

    @property
    def num_elements(self) -> int:
        """Numbers in all tables."""
        return sum(rows * dim for rows, dim in zip(self.rows, self.dims, strict=True))

    @property
    def num_batches(self) -> int:
        """Different batches of a benchmark, 4 to 64: together they read FOOTPRINT_BYTES as float32."""
        batch_bytes = 4 * self.batch_size * self.bag_size * sum(self.dims)
        return min(max(math.ceil(FOOTPRINT_BYTES / batch_bytes), 4), 64)


@dataclass(frozen=True)
class IdBatch:
    """Ids of all features, one feature after the other."""

    ids: NDArray[np.int64]
    """[nnz]."""
    lengths: NDArray[np.int64]
    """Ids of each bag [F * B]."""
    weights: NDArray[np.float32] | None
    """Weight of each id [nnz]."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Bag g owns ids[offsets[g] : offsets[g + 1]]; [F * B + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


@dataclass(frozen=True, kw_only=True)
class DlrmWorkload:
    """A DLRM (arXiv 1906.00091) to train."""

    lookups: LookupWorkload
    """Its tables and their ids."""
    bottom_mlp: tuple[int, ...]
    """Hidden widths; the last layer, as wide as the tables, comes on top."""
    top_mlp: tuple[int, ...]
    """Hidden widths; the single output comes on top."""
    num_dense: int = 13

    @staticmethod
    def from_json(document: dict[str, Any]) -> DlrmWorkload:
        """The inverse of dataclasses.asdict after a trip through JSON."""
        return DlrmWorkload(
            lookups=LookupWorkload.from_json(document["lookups"]),
            bottom_mlp=tuple(document["bottom_mlp"]),
            top_mlp=tuple(document["top_mlp"]),
            num_dense=document["num_dense"],
        )

    @property
    def name(self) -> str:
        """Of its traffic."""
        return self.lookups.name

    @property
    def dim(self) -> int:
        """Columns of every table."""
        return self.lookups.dims[0]


@dataclass(frozen=True)
class TrainingBatch:
    """One rank's slice of a batch to train on."""

    dense: NDArray[np.float32]
    """[B, num_dense]."""
    ids: NDArray[np.int64]
    """[F, B, bag_size]."""
    label: NDArray[np.float32]
    """0 or 1, a quarter of them 1; [B]."""


def make_training_batches(training: DlrmWorkload, rank: int = 0, num_ranks: int = 1) -> list[TrainingBatch]:
    """`traffic.num_batches` batches, cut evenly over the ranks; bags must not be ragged."""
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
    """The same batches in every process."""
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
    """Every row as likely as any other; int64 [count] in 0..num_rows-1."""
    return random.integers(0, num_rows, count, dtype=np.int64)


def zipf_ids(random: np.random.Generator, count: int, num_rows: int) -> NDArray[np.int64]:
    """Rank k of num_rows with the share of [k+1, k+2) under x^-1.05 on [1, num_rows + 1); ranks are then scattered over
    the table, so that frequent rows are not neighbours. int64 [count] in 0..num_rows-1."""
    uniform = random.random(count)
    rest = 1.0 - ZIPF_EXPONENT
    x = (1.0 + uniform * ((num_rows + 1.0) ** rest - 1.0)) ** (1.0 / rest)  # the inverse of the distribution function
    ranks = np.clip(x.astype(np.int64) - 1, 0, num_rows - 1)
    return permute_rows(ranks, num_rows)


def permute_rows(ranks: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """A bijection of 0..num_rows-1."""
    factor = _HASH_MULTIPLIER
    while math.gcd(factor, num_rows) != 1:
        factor += 2
    return ranks * (factor % num_rows) % num_rows
