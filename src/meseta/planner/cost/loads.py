"""Sizes of rows and of their optimizer states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.cache_misses import cache_misses, request_rates
from meseta.planner.cost.reuse import Floats, row_classes
from meseta.spec import COLUMN_BLOCK, MesetaError, Reuse, TableSpec, Workload
from meseta.spec.tables import ELEMENT_BYTES
from meseta.spec.tiers import HBM, OFFLOADED_TIERS, TIERS
from meseta.spec.transfer import ROW_STATISTICS, element_bytes


def value_bytes(table: TableSpec) -> int:
    """Return the bytes per stored element of a row."""
    return ELEMENT_BYTES[table.dtype]


def compute_bytes(table: TableSpec) -> int:
    """Return the bytes per element of bags, gradients and optimizer states."""
    return element_bytes((table,))


def state_bytes_per_row(table: TableSpec) -> int:
    """Return the bytes of the optimizer state of one row."""
    per_element, per_row = table.num_states
    return (per_element * table.embedding_dim + per_row) * compute_bytes(table)


def shard_storage_bytes(table: TableSpec, num_rows: int, num_columns: int) -> int:
    """Return the bytes of a shard including its optimizer state, rounded up."""
    row_bytes = table.embedding_dim * value_bytes(table) + state_bytes_per_row(table)
    return math.ceil(num_rows * row_bytes * num_columns / table.embedding_dim)


Indices = NDArray[np.int64]
CACHE_LINE_BYTES = 64
"""Bytes per cache line."""
TLB_REACH_BYTES = 64e6
"""Amount of memory whose page addresses are cached. Each doubling beyond it makes address translation slower."""
OFFLOADED_TIER_INDICES = [TIERS.index(tier) for tier in OFFLOADED_TIERS]
"""Indices in `TIERS` of the offloaded tiers."""
_SAMPLE_EXPONENTS = np.linspace(-1.0, 10.0, 45)
"""Decimal logarithms of the numbers of samples for which the content of the hardware cache is computed."""


@dataclass(frozen=True)
class ShardArrays:
    """Row and column ranges of shards, with one entry per shard [n]."""

    table: Indices  # index in `Workload.tables`
    first_row: Indices
    stop_row: Indices
    """Exclusive end of the row range."""
    first_column: Indices
    stop_column: Indices
    """Exclusive end of the column range."""
    tier: Indices  # index in `TIERS`
    cache_rows: Indices
    """Capacity of the row cache in offloaded tiers, otherwise 0."""

    @staticmethod
    def from_values(
        table: object,
        rows: tuple[object, object],
        columns: tuple[object, object],
        tier: object = 0,
        cache_rows: object = 0,
    ) -> ShardArrays:
        """Create an instance from arrays or scalars, which are broadcast to the same length."""
        values = (table, *rows, *columns, tier, cache_rows)
        return ShardArrays(*np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, np.int64)) for a in values)))

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> ShardArrays:
        """Return the selected shards. An index may occur several times."""
        return ShardArrays(*(getattr(self, entry.name)[which] for entry in fields(ShardArrays)))

    @property
    def num_rows(self) -> Indices:
        return self.stop_row - self.first_row

    @property
    def num_columns(self) -> Indices:
        return self.stop_column - self.first_column


@dataclass(frozen=True)
class ShardLoads:
    """Loads of shards in one step. Arrays have one entry per shard [n], and type float64 unless annotated otherwise."""

    num_features: Floats  # features that read the shard
    num_ids: Floats
    num_bags: Floats
    num_lengths: Floats
    """Number of bags of all features, whose lengths are sent with the ids."""
    num_output_rows: Floats
    """Number of pooled bags, plus number of rows returned to features without pooling."""
    num_unpooled_features: Floats  # features that read the shard without pooling
    num_requested_rows: Floats
    """Number of distinct rows per requesting rank and feature, summed over features without pooling."""
    num_distinct_rows: Floats
    """Number of rows that the update changes: the distinct rows of the ids, or all rows if the optimizer steps all
    rows."""
    lookup_misses: Floats
    """Number of rows that the lookup reads from device memory, and not from the hardware cache. Rows that share a cache
    line count as one."""
    update_misses: Floats
    """Number of rows that the update reads from device memory, counted as in `lookup_misses`."""
    update_bytes: Floats
    """Bytes of rows and optimizer states that the update reads and writes, in complete cache lines."""
    update_miss_share: Floats
    """Share of `update_bytes` that is in device memory, and not in the hardware cache."""
    page_walks: Floats
    """Number of ids, times the number of doublings of the rank's rows and states beyond `TLB_REACH_BYTES`."""
    tier_misses: Floats
    """Number of rows that a step fetches from a memory below device memory, and writes back."""
    num_columns: Floats
    row_bytes: Floats  # bytes of one row as stored
    state_bytes: Floats  # bytes of the optimizer state of one row
    element_bytes: Floats
    """Bytes per element of a bag or gradient: 8 if a table has type float64, otherwise 4."""
    num_rows: Floats
    cache_rows: Floats  # 0 unless the tier is offloaded
    is_half: NDArray[np.bool_]
    """Whether rows are stored in 16 bits."""
    is_unaligned: NDArray[np.bool_]
    """Whether bags are not aligned to vectors, because some table has a number of columns that is not a
    multiple of 16."""
    is_staged: NDArray[np.bool_]
    """Whether the update runs in stages, because the shard has only some columns and the optimizer sums over rows."""
    is_frozen: NDArray[np.bool_]
    num_weights: Floats
    optimizer_index: Indices  # index in `optimizers`
    tier_index: Indices  # index in `TIERS`
    optimizers: tuple[str, ...]

    @property
    def stored_bytes(self) -> Floats:
        """Bytes of all rows and optimizer states."""
        return self.num_rows * (self.row_bytes + self.state_bytes)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_] | slice) -> ShardLoads:
        """Return the loads of the selected shards."""
        arrays = [entry.name for entry in fields(ShardLoads) if entry.name != "optimizers"]
        return ShardLoads(**{name: getattr(self, name)[which] for name in arrays}, optimizers=self.optimizers)


class WorkloadLoads:
    """Workload as arrays over its tables. Features of one table are assumed to request its rows with the frequencies of
    the one with the most ids."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        tables, features = workload.tables, workload.features
        self.table_index = {table.name: number for number, table in enumerate(tables)}
        """Index of each table in `Workload.tables`, by name."""
        self.optimizers = tuple(dict.fromkeys(table.optimizer.name for table in tables))
        self.num_rows = np.array([t.num_embeddings for t in tables], np.int64)
        self.dims = np.array([t.embedding_dim for t in tables], np.int64)
        self.value_bytes = np.array([value_bytes(t) for t in tables], np.float64)
        self.compute_bytes = np.array([compute_bytes(t) for t in tables], np.float64)
        states = np.array([t.num_states for t in tables], np.float64).reshape(-1, 2)
        self.element_states, self.row_states = states[:, 0], states[:, 1]
        self.optimizer_index = np.array([self.optimizers.index(t.optimizer.name) for t in tables], np.int64)
        self.sums_rows = np.array([t.optimizer.name in ROW_STATISTICS for t in tables], bool)
        """Whether the optimizer of each table needs sums over rows."""
        self.steps_all_rows = np.array([t.optimizer.stepped_rows == "all" for t in tables], bool)
        self.element_bytes = element_bytes(tables)
        """Bytes per element of a bag, in one type for all tables."""
        weighted = {feature.batch for feature in features if feature.weighted}
        n = len(tables)
        self.num_features, self.num_pooled, self.pooled_ids = np.zeros(n), np.zeros(n), np.zeros(n)
        self.ids_per_sample, self.weights_per_sample = np.zeros(n), np.zeros(n)
        most, self.is_frequency_sorted = np.full(n, -1.0), np.zeros(n, bool)
        reuse: list[Reuse | None] = [None] * n
        for feature in features:
            table, load = self.table_index[feature.table], workload.load(feature)
            self.num_features[table] += 1
            self.ids_per_sample[table] += load.pooling_factor
            self.weights_per_sample[table] += load.pooling_factor * (feature.batch in weighted)
            if feature.pooling != "none":
                self.num_pooled[table] += 1
                self.pooled_ids[table] += load.pooling_factor
            if load.pooling_factor > most[table]:
                most[table], self.is_frequency_sorted[table], reuse[table] = (
                    load.pooling_factor,
                    load.is_sorted,
                    load.reuse,
                )
        self.row_classes = row_classes(self.num_rows.tolist(), np.maximum(most, 0.0).tolist(), reuse)

    def whole_tables(self, tables: Sequence[int] | Indices | None = None) -> ShardArrays:
        """Return the given tables, or all tables, as one shard each."""
        which = np.arange(len(self.num_rows)) if tables is None else np.asarray(tables, np.int64)
        return ShardArrays.from_values(which, (0, self.num_rows[which]), (0, self.dims[which]))

    def lookup_share(self, pieces: ShardArrays) -> Floats:
        """Return the share of a table's lookups that the rows of each shard receive [n].

        If rows are sorted by frequency, the classes of the reuse histogram determine it. Otherwise it is proportional
        to the number of rows.
        """
        classes = self.row_classes.take(pieces.table)
        overlap = self._rows_by_class(pieces, classes.num_rows)
        return (classes.lookup_shares * overlap / np.maximum(classes.num_rows, 1e-12)).sum(axis=1)

    def distinct_rows(self, pieces: ShardArrays, num_samples: Floats | float) -> Floats:
        """Return the expected number of distinct rows of each shard [n] that `num_samples` samples look up."""
        t = pieces.table
        if np.ndim(num_samples) == 0:  # Compute once per table, regardless of its number of shards.
            chance = self.row_classes.lookup_probability(num_samples * self.ids_per_sample)
            if not self.is_frequency_sorted[t].any():
                return (self.row_classes.num_rows * chance).sum(axis=1)[t] * (pieces.num_rows / self.num_rows[t])
            chance = chance[t]
        else:
            chance = self.row_classes.take(t).lookup_probability(num_samples * self.ids_per_sample[t])
        return (self._rows_by_class(pieces, self.row_classes.num_rows[t]) * chance).sum(axis=1)

    def shard_loads(
        self,
        pieces: ShardArrays,
        *,
        num_samples: float | None = None,
        hardware_cached_samples: Floats | float = 0.0,
        rank_bytes: Floats | float = 0.0,
        num_ranks: int = 1,
    ) -> ShardLoads:
        """Return the loads of shards in one step.

        Args:
            pieces: Shards [n].
            num_samples: Number of samples whose ids reach the shards. `None` means the global batch. Replicas receive
                the samples of one rank.
            hardware_cached_samples: Number of previous samples whose rows are still in the hardware cache [n].
            rank_bytes: Bytes of all rows and states on the rank of each shard [n].
            num_ranks: Number of ranks that the samples are divided among.
        """
        samples = self._num_samples(num_samples)
        t, held = pieces.table, np.broadcast_to(np.asarray(hardware_cached_samples, np.float64), pieces.table.shape)
        share = self.lookup_share(pieces)
        ids = samples * self.ids_per_sample[t] * share
        distinct = np.minimum(self.distinct_rows(pieces, samples), ids)
        touched = np.where(self.steps_all_rows[t], pieces.num_rows, distinct)
        row_bytes, state_bytes = self.row_bytes(pieces)
        miss_share = 1.0 - np.clip(held / max(samples, 1.0), 0.0, 1.0)
        bags = samples * self.num_pooled[t]
        return ShardLoads(
            num_features=self.num_features[t],
            num_ids=ids,
            num_bags=bags,
            num_lengths=samples * self.num_features[t],
            num_output_rows=bags + ids * (1.0 - self.pooled_ids[t] / np.maximum(self.ids_per_sample[t], 1e-12)),
            num_unpooled_features=self.num_features[t] - self.num_pooled[t],
            num_requested_rows=self._requested_rows(pieces, samples, num_ranks),
            num_distinct_rows=touched,
            lookup_misses=np.clip(self._new_lines(pieces, held, samples), 0.0, distinct),
            update_misses=_touched_lines(touched, pieces.num_rows, row_bytes) * miss_share,
            update_bytes=_line_bytes(touched, pieces.num_rows, row_bytes)
            + _line_bytes(touched, pieces.num_rows, state_bytes),
            update_miss_share=miss_share,
            page_walks=ids * np.log2(1.0 + np.asarray(rank_bytes, np.float64) / TLB_REACH_BYTES),
            tier_misses=self._tier_misses(pieces, samples, distinct),
            num_columns=pieces.num_columns.astype(np.float64),
            row_bytes=row_bytes,
            state_bytes=state_bytes,
            element_bytes=np.full(len(t), float(self.element_bytes)),
            num_rows=pieces.num_rows.astype(np.float64),
            cache_rows=pieces.cache_rows.astype(np.float64),
            is_half=self.value_bytes[t] == 2,
            is_unaligned=np.full(len(t), bool((self.dims % COLUMN_BLOCK).any())),
            is_staged=(pieces.num_columns < self.dims[t]) & self.sums_rows[t],
            is_frozen=np.array([name == "frozen" for name in self.optimizers], bool)[self.optimizer_index[t]],
            num_weights=samples * self.weights_per_sample[t] * share,
            optimizer_index=self.optimizer_index[t],
            tier_index=pieces.tier,
            optimizers=self.optimizers,
        )

    def _num_samples(self, num_samples: float | None) -> float:
        samples = float(self.workload.batch_size if num_samples is None else num_samples)
        if samples < 0:
            raise MesetaError(f"loads: num_samples must not be negative, got {samples}")
        return samples

    def _new_lines(self, pieces: ShardArrays, held: Floats, samples: float) -> Floats:
        """Return the number of cache lines [n] that a step reads in addition to those of the `held` samples
        before it."""
        row_bytes, _ = self.row_bytes(pieces)
        before, after = (
            _touched_lines(self.distinct_rows(pieces, n), pieces.num_rows, row_bytes) for n in (held, held + samples)
        )
        lines: Floats = after - before
        return lines

    def _requested_rows(self, pieces: ShardArrays, samples: float, num_ranks: int) -> Floats:
        t = pieces.table
        features = self.num_features[t] - self.num_pooled[t]
        if not features.any():
            return np.zeros(len(t))
        share = 1.0 - self.pooled_ids[t] / np.maximum(self.ids_per_sample[t], 1e-12)
        each = np.maximum(features, 1.0)
        num_requested: Floats = num_ranks * features * self.distinct_rows(pieces, samples / num_ranks * share / each)
        return num_requested

    def hardware_cached_samples(
        self, pieces: ShardArrays, owners: Indices, num_owners: int, cache_bytes: float
    ) -> Floats:
        """Return the number of samples whose rows fit together into the hardware cache of each owner [num_owners].
        `owners` has one per shard [n]."""
        # An unused row remains in an LRU cache for this number of samples (P. J. Denning, "The working set model for
        # program behavior", Communications of the ACM 11, 1968).
        sizes = self.row_bytes(pieces)

        def held_bytes(num_samples: float) -> Floats:
            rows = self.distinct_rows(pieces, num_samples)
            return sum((_line_bytes(rows, pieces.num_rows, size) for size in sizes), np.zeros(len(rows)))

        cached: dict[int, Floats] = {}

        def filled(indices: Indices) -> Floats:
            num_bytes = np.zeros(num_owners)
            for index in np.unique(indices).tolist():
                if index not in cached:
                    by_owner = np.bincount(owners, held_bytes(10.0 ** _SAMPLE_EXPONENTS[index]), num_owners)
                    cached[index] = by_owner.astype(np.float64)
                num_bytes = np.where(indices == index, cached[index], num_bytes)
            return num_bytes

        # Bytes increase with the number of samples, so bisection finds the two exponents around the cache size.
        below, above = np.zeros(num_owners, np.int64), np.full(num_owners, len(_SAMPLE_EXPONENTS) - 1)
        while (above - below > 1).any():
            middle = (below + above) // 2
            fits = filled(middle) <= cache_bytes
            below, above = np.where(fits, middle, below), np.where(fits, above, middle)
        first, last = filled(below), filled(above)
        part = np.clip((cache_bytes - first) / np.maximum(last - first, 1e-12), 0.0, 1.0)
        return 10.0 ** (_SAMPLE_EXPONENTS[below] + part * (_SAMPLE_EXPONENTS[above] - _SAMPLE_EXPONENTS[below]))

    def stored_bytes(self, pieces: ShardArrays) -> Floats:
        """Return the bytes of rows and optimizer states of each shard [n]."""
        row_bytes, state_bytes = self.row_bytes(pieces)
        return pieces.num_rows * (row_bytes + state_bytes)

    def row_bytes(self, pieces: ShardArrays) -> tuple[Floats, Floats]:
        """Return the bytes of a row, and of its optimizer state, of each shard, both [n]."""
        t, columns = pieces.table, pieces.num_columns.astype(np.float64)
        state = (columns * self.element_states[t] + self.row_states[t]) * self.compute_bytes[t]
        return columns * self.value_bytes[t], state

    def _rows_by_class(self, pieces: ShardArrays, extents: Floats) -> Floats:  # [n, K]
        t = pieces.table
        proportional = extents * (pieces.num_rows / self.num_rows[t])[:, None]
        if not self.is_frequency_sorted[t].any():
            return proportional
        ends = np.cumsum(extents, axis=1)
        inside = np.minimum(ends, pieces.stop_row[:, None]) - np.maximum(ends - extents, pieces.first_row[:, None])
        return np.where(self.is_frequency_sorted[t][:, None], np.maximum(inside, 0.0), proportional)

    def _tier_misses(self, pieces: ShardArrays, samples: float, distinct: Floats) -> Floats:
        misses = np.where(pieces.tier == TIERS.index(HBM), 0.0, distinct)
        far = np.flatnonzero(np.isin(pieces.tier, OFFLOADED_TIER_INDICES))
        if far.size:
            misses[far] = np.minimum(self.cache_misses(pieces.take(far), samples), distinct[far])
        return misses

    def min_cache_rows(self, pieces: ShardArrays, num_batches: int) -> Indices:
        """Return the cache capacity of each shard [n] that holds the rows of `num_batches` batches, with a margin."""
        distinct = self.distinct_rows(pieces, float(num_batches * self.workload.batch_size))
        least = np.ceil(1.05 * distinct + 4.0 * np.sqrt(distinct) + 1.0)
        return np.minimum(least, pieces.num_rows).astype(np.int64)

    def cache_misses(self, pieces: ShardArrays, samples: float) -> Floats:
        """Return the expected number of distinct rows of `samples` samples that are not in the row cache, per shard
        [n]."""
        is_sorted = self.is_frequency_sorted[pieces.table]
        key = [pieces.table, np.where(is_sorted, pieces.first_row, 0), pieces.num_rows, pieces.cache_rows]
        # Shards with the same rows have the same misses, so they are computed once.
        _, first, inverse = np.unique(np.stack(key), axis=1, return_index=True, return_inverse=True)
        distinct_pieces = pieces.take(first)
        rows, rates = (values[distinct_pieces.table] for values in self._request_rates)
        rows = self._rows_by_class(distinct_pieces, rows)
        requests = rates * (samples * self.ids_per_sample[distinct_pieces.table])[:, None]
        misses = cache_misses(
            rows, requests, distinct_pieces.cache_rows.astype(np.float64), (rows * requests).sum(axis=1)
        )
        return misses[inverse.reshape(-1)]

    @cached_property
    def _request_rates(self) -> tuple[Floats, Floats]:
        return request_rates(self.row_classes)


def _touched_lines(rows: Floats, num_rows: Indices, row_bytes: Floats) -> Floats:
    """Return the expected number of cache lines that `rows` rows touch. A row longer than a line counts once."""
    per_line = np.clip(np.floor(CACHE_LINE_BYTES / np.maximum(row_bytes, 1.0)), 1.0, None)
    # Of L lines with k rows each, L (1 - (1 - share)^k) are touched if the rows are at random positions.
    share = np.clip(rows / num_rows, 0.0, 1.0)
    return num_rows / per_line * (1.0 - (1.0 - share) ** per_line)


def _line_bytes(rows: Floats, num_rows: Indices, row_bytes: Floats) -> Floats:
    return _touched_lines(rows, num_rows, row_bytes) * spanned_bytes(row_bytes)


def spanned_bytes(row_bytes: Floats) -> Floats:
    """Return the bytes of the cache lines that contain a row of `row_bytes` bytes, averaged over its positions in a
    table."""
    return row_bytes + CACHE_LINE_BYTES - np.gcd(row_bytes.astype(np.int64), CACHE_LINE_BYTES)
