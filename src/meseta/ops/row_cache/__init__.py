"""Caches of the rows of offloaded shards. A batch pins its rows of all caches in one call."""
# docs/tiers.md describes the purpose of the caches.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meseta.ops.core import core
from meseta.ops.eviction import GHOST_SCORES_PER_SLOT, HALF_LIVES
from meseta.sparse.shapes import Bool, Int, Shaped
from meseta.spec import MesetaError

EMPTY = -1
"""Row of an empty slot, and slot of a row that is not in the cache."""


class UnwrittenRows(NamedTuple):
    """Unwritten rows of a pinned batch. The caller must compute their initial values."""

    cache_index: int
    """Index of the cache."""
    rows: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]


class CacheMoves(NamedTuple):
    """Rows to copy between a cache and its backing store, for a cache whose caller moves the values, as on a GPU."""

    evicted_rows: Int[Tensor, " n"]
    """Changed rows whose slots are reused. The caller must write them to the backing store immediately."""
    evicted_slots: Int[Tensor, " n"]
    fetched_rows: Int[Tensor, " m"]
    """Rows to copy into the cache. Their records are complete after `PinnedRows.wait`."""
    fetched_slots: Int[Tensor, " m"]
    records: Shaped[Tensor, "m bytes"]
    """uint8 records of `fetched_rows`."""
    is_written: Bool[Tensor, " m"]
    """Whether each fetched row has a record. The others are unwritten rows."""


@dataclass(frozen=True)
class CacheCounters:
    """Counters of a cache since it was opened."""

    num_lookups: int
    """Number of ids in training batches."""
    num_rows: int
    """Number of distinct rows, summed over training batches."""
    num_misses: int
    """Number of these rows that were not in the cache."""
    num_written_back: int
    """Number of rows written to the backing store."""
    num_read_only: int
    """Number of rows that were read for evaluation, outside the cache."""


class BackingStoreError(MesetaError):
    """Failure of the backing store of a cache."""

    def __init__(self, index: int, failure: Sequence[int]) -> None:
        super().__init__(f"row cache {index}: the backing store failed ({list(failure)})")
        self.cache_index, self.failure = index, list(failure)


class CacheFullError(MesetaError):
    """Batch that looks up more rows than a cache has unpinned slots."""

    def __init__(self, index: int, num_rows: int, num_missing: int, num_others: int) -> None:
        super().__init__(
            f"row cache {index}: a batch looks up {num_rows:,} rows, of which {num_missing:,} are not cached, "
            f"while other batches need {num_others:,} slots"
        )
        self.cache_index, self.num_rows, self.num_missing, self.num_pinned_by_others = (
            index,
            num_rows,
            num_missing,
            num_others,
        )


class RowCache:
    """Cached rows of one shard in slots 0..num_slots-1, evicted by `meseta.ops.eviction`.

    The slots after num_slots are for read-only access such as evaluation. Their rows stay only while they are pinned.
    """

    def __init__(
        self,
        num_slots: int,
        num_read_only_slots: int,
        num_rows: int,
        backing_store: object,
        values: Sequence[Tensor] = (),
    ) -> None:
        """Create an empty cache for `num_rows` rows.

        Args:
            num_slots: Number of slots.
            num_read_only_slots: Number of additional slots for read-only access.
            num_rows: Number of rows of the shard.
            backing_store: Native handle of the backing store, as `memory_backing_store` returns it.
            values: Tensors [num_slots + num_read_only_slots, ...] whose rows together form a record. Without them the
                caller moves the values.

        Raises:
            MesetaError: Sizes do not match each other.
        """
        rows = np.zeros(num_slots + num_read_only_slots, np.int64)  # Pages that are never written take no memory.
        rows[:num_slots] = EMPTY
        self.rows: Int[Tensor, " slots"] = torch.from_numpy(rows)
        """Row of each slot, or EMPTY. Meaningless for read-only slots."""
        self.num_slots = num_slots
        fields = [(v.data_ptr(), v[0].numel() * v.element_size(), len(v)) for v in values]
        kept, half_lives = min(num_rows, GHOST_SCORES_PER_SLOT * num_slots), [times * num_slots for times in HALF_LIVES]
        try:
            self._cache = core().open_row_cache(rows, num_slots, kept, half_lives, backing_store, fields)
        except ValueError as error:
            raise MesetaError(f"row cache: {error}") from None
        self._values = values

    def find(self, rows: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return the slot of each row, or EMPTY."""
        slots = torch.empty(len(rows), dtype=torch.int64)
        core().find_in_cache(self._cache, rows.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def cached_rows(self) -> Int[Tensor, " n"]:
        """Return the rows in the cache, sorted."""
        rows = self.rows[: self.num_slots]
        return rows[rows != EMPTY].sort().values

    def dirty_slots(self) -> Int[Tensor, " n"]:
        """Return the slots of rows that differ from the backing store, ordered by row."""
        return torch.from_numpy(core().dirty_slots(self._cache))

    def write_back(self, slots: Int[Tensor, " n"]) -> None:
        """Write the rows in `slots` to the backing store. Raises BackingStoreError if that fails."""
        index, *failure = core().write_back_slots(self._cache, slots.numpy())
        if failure[0] != 0:
            raise BackingStoreError(index, failure)

    def mark_clean(self, slots: Int[Tensor, " n"]) -> None:
        """Mark the rows in `slots` as equal to the backing store, after the caller has written them."""
        core().clean_slots(self._cache, slots.numpy())

    def num_bytes(self) -> int:
        """Return the memory of the cache in bytes, without `rows` and values."""
        return int(self._raw_counters()[0])

    @property
    def num_pinned(self) -> int:
        """Number of pinned slots."""
        return self._raw_counters()[1]

    @property
    def counters(self) -> CacheCounters:
        """Counters since the cache was opened."""
        return CacheCounters(*self._raw_counters()[2:])

    def _raw_counters(self) -> list[int]:
        return core().row_cache_numbers(self._cache)


class PinnedRows:
    """Rows of several caches that a batch needs. They keep their slots until `unpin`."""

    def __init__(self, pinned: object, places: Sequence[Int[Tensor, " _"]]) -> None:
        self._pinned = pinned
        self.slots = places
        """Slot of each id, for each entry of `looked_up`."""

    def wait(self) -> list[UnwrittenRows]:
        """Wait until all rows are in their slots. Returns the unwritten rows, which have no values yet.

        Must be called once. Raises BackingStoreError if a read fails. The missing rows are then removed from the cache.
        """
        failed, absent = core().wait_for_rows(self._pinned, torch.get_num_threads())
        if failed:
            raise BackingStoreError(failed[0], failed[1:])
        return [UnwrittenRows(index, torch.from_numpy(rows), torch.from_numpy(slots)) for index, rows, slots in absent]

    def moves(self, index: int) -> CacheMoves:
        """Return the moves of a cache without values."""
        return CacheMoves(*map(torch.from_numpy, core().cache_moves(self._pinned, index)))

    def num_rows(self, index: int) -> tuple[int, int]:
        """Return (number of distinct rows, number of cache misses) for one cache."""
        return core().num_pinned_rows(self._pinned, index)

    def unpin(self) -> None:
        """Unpin the rows of a finished batch. Unless the access was read-only, they are marked as changed."""
        core().unpin_rows(self._pinned)


def pin_rows(
    caches: Sequence[RowCache], looked_up: Sequence[tuple[int, Int[Tensor, " _"]]], *, read_only: bool = False
) -> PinnedRows:
    """Pin rows in their caches, and start to fetch missing ones.

    Args:
        caches: Caches that the batch uses.
        looked_up: Pairs of a cache index and rows. Rows may be repeated.
        read_only: Whether rows are only read. They then change nothing and evict no row.

    Raises:
        CacheFullError: There are not enough unpinned slots. Nothing is pinned.
        BackingStoreError: Evicted rows cannot be written. Nothing is pinned.
    """
    sizes = [len(rows) for _, rows in looked_up]
    of = [index for index, _ in looked_up]
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(rows.to("cpu", torch.int64) for _, rows in looked_up)])
    places, bounds = torch.empty_like(rows), list(accumulate(sizes, initial=0))
    handles, threads = [cache._cache for cache in caches], torch.get_num_threads()
    try:
        pinned, why = core().pin_rows(handles, rows.numpy(), bounds, of, places.numpy(), read_only, threads)
    except ValueError as error:
        raise MesetaError(f"row cache: {error}") from None
    if pinned is None:
        raise CacheFullError(*why) if len(why) == 4 else BackingStoreError(why[0], why[1:])
    return PinnedRows(pinned, [places[first:stop] for first, stop in pairwise(bounds)])


def memory_backing_store(records: Shaped[Tensor, "n bytes"], present: Bool[Tensor, " n"]) -> Any:
    """Return the handle of a store in memory that the caller keeps alive: uint8 records and whether each is written."""
    return core().memory_backing_store(records.numpy(), present.numpy())
