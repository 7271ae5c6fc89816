"""What a step asks of pieces of tables: ids, bags, distinct rows, bytes; many pieces at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.cache_misses import cache_misses, request_rates
from meseta.planner.cost.reuse import Floats, row_classes
from meseta.planner.cost.sizes import compute_bytes, value_bytes
from meseta.spec import COLUMN_BLOCK, MesetaError, Reuse, Workload
from meseta.spec.tiers import HBM, OFFLOADED_TIERS, TIERS
from meseta.spec.transfer import ROW_STATISTICS, element_bytes

Indices = NDArray[np.int64]
"""Numbers in `Pieces.tier` index this."""
CACHE_LINE_BYTES = 64
"""What memory gives at a time."""
TLB_REACH_BYTES = 64e6
"""Pages of so many bytes have their addresses at hand; each doubling beyond makes the walk to an address longer."""
OFFLOADED_TIER_INDICES = [TIERS.index(tier) for tier in OFFLOADED_TIERS]
"""In `Pieces.tier`: whose rows lie near and far."""
_SAMPLE_EXPONENTS = np.linspace(-1.0, 10.0, 45)
"""Powers of ten of samples, at which what a cache holds is tried."""


@dataclass(frozen=True)
class ShardArrays:
    """Rectangles of tables, [n] each; scalars are spread out by `of`."""

    table: Indices
    """Index in `Workload.tables`."""
    first_row: Indices
    stop_row: Indices
    """One after the last."""
    first_column: Indices
    stop_column: Indices
    """One after the last."""
    tier: Indices
    """Index in TIERS."""
    cache_rows: Indices
    """Of tiers 'cached' and 'disk': rows that lie near at most; of others 0."""

    @staticmethod
    def from_values(
        table: object,
        rows: tuple[object, object],
        columns: tuple[object, object],
        tier: object = 0,
        cache_rows: object = 0,
    ) -> ShardArrays:
        """From arrays or scalars of equal or broadcast length."""
        given = (table, *rows, *columns, tier, cache_rows)
        return ShardArrays(*np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, np.int64)) for a in given)))

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> ShardArrays:
        """Some of them, repeated or not."""
        return ShardArrays(*(getattr(self, entry.name)[which] for entry in fields(ShardArrays)))

    @property
    def num_rows(self) -> Indices:
        return self.stop_row - self.first_row

    @property
    def num_columns(self) -> Indices:
        return self.stop_column - self.first_column


@dataclass(frozen=True)
class ShardLoads:
    """What one step asks of each piece; float64 [n] where not said otherwise."""

    num_features: Floats
    """Features that read the piece: routes of ids."""
    num_ids: Floats
    """Lookups."""
    num_bags: Floats
    """Bags that are pooled."""
    num_lengths: Floats
    """Bags of all features, pooled or not: a length of each travels with the ids."""
    num_output_rows: Floats
    """Bags and, of features that are not pooled, rows that are returned."""
    num_unpooled_features: Floats
    """Features that read the piece and are not pooled."""
    num_requested_rows: Floats
    """Of features that are not pooled, rows, each once for each rank that asks and feature."""
    num_distinct_rows: Floats
    """Rows looked up at least once."""
    lookup_misses: Floats
    """Rows that the lookup fetches from the device's memory, narrow rows in one line counting as one; other lookups
    find theirs in a cache."""
    update_misses: Floats
    """Rows that the update fetches from there, counted alike."""
    update_bytes: Floats
    """Lines of rows and state that the update reads and writes."""
    update_miss_share: Floats
    """Share of them that come from the device's memory."""
    page_walks: Floats
    """Lookups, times the doublings of what their rank holds above 64 MB."""
    tier_misses: Floats
    """Rows that a step fetches from the tier below the device's memory, and writes back to it."""
    num_columns: Floats
    """Of the piece."""
    row_bytes: Floats
    """A row of the piece, as stored."""
    state_bytes: Floats
    """Its optimizer state."""
    element_bytes: Floats
    """A number of a bag or a gradient: 4, or 8 of tables in float64."""
    num_rows: Floats
    """Rows of the piece."""
    cache_rows: Floats
    """Of these, those that lie near at most, where others lie far."""
    is_half: NDArray[np.bool_]
    """Whether rows are stored in 16 bits."""
    is_unaligned: NDArray[np.bool_]
    """Whether bags lie off the borders of vectors, since a table of the model has no multiple of 16 columns."""
    is_staged: NDArray[np.bool_]
    """Whether the update goes in stages, since the piece holds some columns of rows whose optimizer sums over rows."""
    is_frozen: NDArray[np.bool_]
    """Whether rows never change."""
    num_weights: Floats
    """Ids that weights travel with."""
    optimizer_index: Indices
    """Index in `optimizers`."""
    tier_index: Indices
    """Index in TIERS."""
    optimizers: tuple[str, ...]
    """Names of the row optimizers of the model."""

    @property
    def stored_bytes(self) -> Floats:
        """Rows and optimizer state of the whole piece."""
        return self.num_rows * (self.row_bytes + self.state_bytes)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_] | slice) -> ShardLoads:
        """Some of the pieces."""
        arrays = [entry.name for entry in fields(ShardLoads) if entry.name != "optimizers"]
        return ShardLoads(**{name: getattr(self, name)[which] for name in arrays}, optimizers=self.optimizers)


class WorkloadLoads:
    """A workload as arrays over its tables, made once; `loads` then costs the same for one piece or 100,000."""

    def __init__(self, workload: Workload) -> None:
        """Several features that read a table are taken to visit its rows alike, as the one with the most ids does."""
        self.workload = workload
        tables, features = workload.tables, workload.features
        self.table_index = {table.name: number for number, table in enumerate(tables)}
        """Number of each table."""
        self.optimizers = tuple(dict.fromkeys(table.optimizer.name for table in tables))
        """Names of the row optimizers."""
        self.num_rows = np.array([t.num_embeddings for t in tables], np.int64)
        self.dims = np.array([t.embedding_dim for t in tables], np.int64)
        self.value_bytes = np.array([value_bytes(t) for t in tables], np.float64)
        self.compute_bytes = np.array([compute_bytes(t) for t in tables], np.float64)
        states = np.array([t.optimizer.num_states for t in tables], np.float64).reshape(-1, 2)
        self.element_states, self.row_states = states[:, 0], states[:, 1]
        self.optimizer_index = np.array([self.optimizers.index(t.optimizer.name) for t in tables], np.int64)
        self.sums_rows = np.array([t.optimizer.name in ROW_STATISTICS for t in tables], bool)
        """Whether the optimizer of each table sums over whole rows."""
        self.steps_all_rows = np.array([t.optimizer.stepped_rows == "all" for t in tables], bool)
        self.element_bytes = element_bytes(tables)
        """Bytes of a number of a bag: the collection has one type for all."""
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
        """Tables that are not cut, all or some."""
        which = np.arange(len(self.num_rows)) if tables is None else np.asarray(tables, np.int64)
        return ShardArrays.from_values(which, (0, self.num_rows[which]), (0, self.dims[which]))

    def lookup_share(self, pieces: ShardArrays) -> Floats:
        """Share of a table's lookups that falls into the rows of each piece [n].

        Of tables whose frequent rows come first, by the classes of the reuse histogram, inside which rows are alike;
        of others, in proportion to the rows."""
        classes = self.row_classes.take(pieces.table)
        overlap = self._rows_by_class(pieces, classes.num_rows)
        return (classes.lookup_shares * overlap / np.maximum(classes.num_rows, 1e-12)).sum(axis=1)

    def distinct_rows(self, pieces: ShardArrays, num_samples: Floats | float) -> Floats:
        """Expected distinct rows of each piece [n] that so many samples look up."""
        t = pieces.table
        if np.ndim(num_samples) == 0:  # once for each table, however many pieces it has
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
        """What one step asks of each piece.

        Args:
            pieces: of tables [n].
            num_samples: samples whose ids reach the pieces; None: the global batch. Replicas see one rank's.
            hardware_cached_samples: rows of so many samples before the step are still in a cache, as
            `hardware_cached_samples` finds; [n].
            rank_bytes: rows and state that the rank of each piece holds together; [n].
            num_ranks: over which the samples are spread; each asks for its rows.
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
        """A number of samples; None: of the global batch."""
        samples = float(self.workload.batch_size if num_samples is None else num_samples)
        if samples < 0:
            raise MesetaError(f"loads: num_samples must not be negative, got {samples}")
        return samples

    def _new_lines(self, pieces: ShardArrays, held: Floats, samples: float) -> Floats:
        """Lines [n] that a step fetches beside those of the `held` samples before it."""
        row_bytes, _ = self.row_bytes(pieces)
        before, after = (
            _touched_lines(self.distinct_rows(pieces, n), pieces.num_rows, row_bytes) for n in (held, held + samples)
        )
        found: Floats = after - before
        return found

    def _requested_rows(self, pieces: ShardArrays, samples: float, num_ranks: int) -> Floats:
        """Rows [n] that features ask for which are not pooled, as in `ShardLoads`."""
        t = pieces.table
        features = self.num_features[t] - self.num_pooled[t]
        if not features.any():
            return np.zeros(len(t))
        share = 1.0 - self.pooled_ids[t] / np.maximum(self.ids_per_sample[t], 1e-12)
        each = np.maximum(features, 1.0)
        found: Floats = num_ranks * features * self.distinct_rows(pieces, samples / num_ranks * share / each)
        return found

    def hardware_cached_samples(
        self, pieces: ShardArrays, owners: Indices, num_owners: int, cache_bytes: float
    ) -> Floats:
        """Samples whose rows fit together into the cache of each owner [num_owners]: how long a row that is not looked
        up stays there, if the one unused for longest leaves first (P. J. Denning, "The working set model for program
        behavior", Communications of the ACM 11, 1968). `owners` is the rank of each piece [n]."""
        sizes = self.row_bytes(pieces)

        def held_bytes(num_samples: float) -> Floats:
            rows = self.distinct_rows(pieces, num_samples)
            return sum((_line_bytes(rows, pieces.num_rows, size) for size in sizes), np.zeros(len(rows)))

        known: dict[int, Floats] = {}

        def filled(indices: Indices) -> Floats:
            found = np.zeros(num_owners)
            for index in np.unique(indices).tolist():
                if index not in known:
                    by_owner = np.bincount(owners, held_bytes(10.0 ** _SAMPLE_EXPONENTS[index]), num_owners)
                    known[index] = by_owner.astype(np.float64)
                found = np.where(indices == index, known[index], found)
            return found

        # The bytes grow with the samples: halving finds the powers on both sides of the cache without trying all.
        below, above = np.zeros(num_owners, np.int64), np.full(num_owners, len(_SAMPLE_EXPONENTS) - 1)
        while (above - below > 1).any():
            middle = (below + above) // 2
            fits = filled(middle) <= cache_bytes
            below, above = np.where(fits, middle, below), np.where(fits, above, middle)
        first, last = filled(below), filled(above)
        part = np.clip((cache_bytes - first) / np.maximum(last - first, 1e-12), 0.0, 1.0)
        return 10.0 ** (_SAMPLE_EXPONENTS[below] + part * (_SAMPLE_EXPONENTS[above] - _SAMPLE_EXPONENTS[below]))

    def stored_bytes(self, pieces: ShardArrays) -> Floats:
        """Rows and optimizer state of each piece [n]."""
        row_bytes, state_bytes = self.row_bytes(pieces)
        return pieces.num_rows * (row_bytes + state_bytes)

    def row_bytes(self, pieces: ShardArrays) -> tuple[Floats, Floats]:
        """Of a row of each piece, and of its optimizer state [n]."""
        t, columns = pieces.table, pieces.num_columns.astype(np.float64)
        state = (columns * self.element_states[t] + self.row_states[t]) * self.compute_bytes[t]
        return columns * self.value_bytes[t], state

    def _rows_by_class(self, pieces: ShardArrays, extents: Floats) -> Floats:
        """Rows of each class that lie in each piece [n, K]."""
        t = pieces.table
        proportional = extents * (pieces.num_rows / self.num_rows[t])[:, None]
        if not self.is_frequency_sorted[t].any():
            return proportional
        ends = np.cumsum(extents, axis=1)
        inside = np.minimum(ends, pieces.stop_row[:, None]) - np.maximum(ends - extents, pieces.first_row[:, None])
        return np.where(self.is_frequency_sorted[t][:, None], np.maximum(inside, 0.0), proportional)

    def _tier_misses(self, pieces: ShardArrays, samples: float, distinct: Floats) -> Floats:
        """Rows that a step brings from where they lie far."""
        misses = np.where(pieces.tier == TIERS.index(HBM), 0.0, distinct)
        far = np.flatnonzero(np.isin(pieces.tier, OFFLOADED_TIER_INDICES))
        if far.size:
            misses[far] = np.minimum(self.cache_misses(pieces.take(far), samples), distinct[far])
        return misses

    def min_cache_rows(self, pieces: ShardArrays, num_batches: int) -> Indices:
        """Of each piece [n]: rows that the batches which are near at once look up, and a little more."""
        distinct = self.distinct_rows(pieces, float(num_batches * self.workload.batch_size))
        least = np.ceil(1.05 * distinct + 4.0 * np.sqrt(distinct) + 1.0)
        return np.minimum(least, pieces.num_rows).astype(np.int64)

    def cache_misses(self, pieces: ShardArrays, samples: float) -> Floats:
        """Of each piece whose rows lie near and far [n]: distinct rows of so many samples that do not lie near."""
        is_sorted = self.is_frequency_sorted[pieces.table]
        key = [pieces.table, np.where(is_sorted, pieces.first_row, 0), pieces.num_rows, pieces.cache_rows]
        _, first, alike = np.unique(np.stack(key), axis=1, return_index=True, return_inverse=True)
        own = pieces.take(first)
        rows, rates = (values[own.table] for values in self._request_rates)
        rows = self._rows_by_class(own, rows)
        requests = rates * (samples * self.ids_per_sample[own.table])[:, None]
        found = cache_misses(rows, requests, own.cache_rows.astype(np.float64), (rows * requests).sum(axis=1))
        return found[alike.reshape(-1)]

    @cached_property
    def _request_rates(self) -> tuple[Floats, Floats]:
        """(rows, requests of a row for each lookup of its table) of each class of each table."""
        return request_rates(self.row_classes)


def _touched_lines(rows: Floats, num_rows: Indices, row_bytes: Floats) -> Floats:
    """Rows that are touched, or lines where several rows share one: of L lines of k rows, L (1 - (1 - rows / all)^k) if
    the rows lie anywhere."""
    per_line = np.clip(np.floor(CACHE_LINE_BYTES / np.maximum(row_bytes, 1.0)), 1.0, None)
    share = np.clip(rows / num_rows, 0.0, 1.0)
    return num_rows / per_line * (1.0 - (1.0 - share) ** per_line)


def _line_bytes(rows: Floats, num_rows: Indices, row_bytes: Floats) -> Floats:
    """Bytes of the lines that these rows touch."""
    return _touched_lines(rows, num_rows, row_bytes) * spanned_bytes(row_bytes)


def spanned_bytes(row_bytes: Floats) -> Floats:
    """Bytes of the lines that a row of so many bytes lies in, on average over its places in a table."""
    return row_bytes + CACHE_LINE_BYTES - np.gcd(row_bytes.astype(np.int64), CACHE_LINE_BYTES)
