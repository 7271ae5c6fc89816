"""Caches of rows that lie far: which rows lie near, in which slots, for the rows of all tables that a batch looks up at
once. docs/tiers.md says what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meseta.jagged.shapes import Bool, Int, Shaped
from meseta.ops.core import core
from meseta.ops.eviction import GHOST_SCORES_PER_SLOT, HALF_LIVES
from meseta.spec import MesetaError

EMPTY = -1
"""Row of a slot that has none, and slot of a row that does not lie near."""


class UnwrittenRows(NamedTuple):
    """Rows that were never written: who has pinned them makes them."""

    cache_index: int
    """Index of their cache."""
    rows: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]


class CacheMoves(NamedTuple):
    """What the caller moves of a cache that moves no values itself, as on a GPU."""

    evicted_rows: Int[Tensor, " n"]
    """Rows that were changed, and lie in slots that others get: to be written to the far side at once."""
    evicted_slots: Int[Tensor, " n"]
    fetched_rows: Int[Tensor, " m"]
    """Those that come in, once `PinnedRows.wait` has returned."""
    fetched_slots: Int[Tensor, " m"]
    records: Shaped[Tensor, "m bytes"]
    """uint8."""
    is_written: Bool[Tensor, " m"]
    """Which were ever written."""


@dataclass(frozen=True)
class CacheCounters:
    """What a cache has done so far."""

    num_lookups: int
    """Ids of batches that were trained."""
    num_rows: int
    """Distinct rows of each of these batches."""
    num_misses: int
    """Those of them that did not lie near."""
    num_written_back: int
    """Rows that the far side was sent."""
    num_read_only: int
    """Rows that were read alone, for an evaluation."""


class BackingStoreError(MesetaError):
    """The far side of a cache has failed."""

    def __init__(self, index: int, failure: Sequence[int]) -> None:
        super().__init__(f"row cache {index}: its far side has failed ({list(failure)})")
        self.cache_index, self.failure = index, list(failure)


class CacheFullError(MesetaError):
    """A batch looks up more rows of a cache than it has slots for."""

    def __init__(self, index: int, num_rows: int, num_missing: int, num_others: int) -> None:
        super().__init__(
            f"row cache {index}: a batch looks up {num_rows:,} rows, {num_missing:,} of which do not lie near, "
            f"and others need {num_others:,} slots"
        )
        self.cache_index, self.num_rows, self.num_missing, self.num_pinned_by_others = (
            index,
            num_rows,
            num_missing,
            num_others,
        )


class RowCache:
    """Slots 0..num_slots-1 hold the rows that lie near; those behind hold rows that are read and nothing else, as an
    evaluation does, for as long as it needs them. Which row leaves is told by meseta.ops.eviction."""

    def __init__(
        self,
        num_slots: int,
        num_read_only_slots: int,
        num_rows: int,
        backing_store: object,
        values: Sequence[Tensor] = (),
    ) -> None:
        """Of `num_rows` rows. `backing_store` is the handle of where they lie, as `memory_backing_store` makes it.
        `values` are those of each slot, [num_slots + num_to_read, ...], in the order of a record; without any, the
        caller moves them.

        Raises MesetaError for sizes that do not fit together.
        """
        rows = np.zeros(num_slots + num_read_only_slots, np.int64)  # pages that nobody writes to take no memory
        rows[:num_slots] = EMPTY
        self.rows: Int[Tensor, " slots"] = torch.from_numpy(rows)
        """Of each slot; EMPTY: none. Of slots that are read alone it means nothing."""
        self.num_slots = num_slots
        fields = [(v.data_ptr(), v[0].numel() * v.element_size(), len(v)) for v in values]
        kept, half_lives = min(num_rows, GHOST_SCORES_PER_SLOT * num_slots), [times * num_slots for times in HALF_LIVES]
        try:
            self._cache = core().open_row_cache(rows, num_slots, kept, half_lives, backing_store, fields)
        except ValueError as error:
            raise MesetaError(f"row cache: {error}") from None
        self._values = values

    def find(self, rows: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Their slots; EMPTY where one does not lie near."""
        slots = torch.empty(len(rows), dtype=torch.int64)
        core().find_in_cache(self._cache, rows.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def cached_rows(self) -> Int[Tensor, " n"]:
        """Those that lie near, ascending."""
        rows = self.rows[: self.num_slots]
        return rows[rows != EMPTY].sort().values

    def dirty_slots(self) -> Int[Tensor, " n"]:
        """Slots whose rows the far side has older, by row."""
        return torch.from_numpy(core().dirty_slots(self._cache))

    def write_back(self, slots: Int[Tensor, " n"]) -> None:
        """Write the rows in some slots to the far side. Raises BackingStoreError."""
        index, *failure = core().write_back_slots(self._cache, slots.numpy())
        if failure[0] != 0:
            raise BackingStoreError(index, failure)

    def mark_clean(self, slots: Int[Tensor, " n"]) -> None:
        """The far side has the rows in some slots."""
        core().clean_slots(self._cache, slots.numpy())

    def num_bytes(self) -> int:
        """Of memory, beside rows and values."""
        return int(self._raw_counters()[0])

    @property
    def num_pinned(self) -> int:
        """Slots that somebody needs."""
        return self._raw_counters()[1]

    @property
    def counters(self) -> CacheCounters:
        """What it has done so far."""
        return CacheCounters(*self._raw_counters()[2:])

    def _raw_counters(self) -> list[int]:
        return core().row_cache_numbers(self._cache)


class PinnedRows:
    """Rows of some caches that a batch needs; they stay in their slots until `end`."""

    def __init__(self, pinned: object, places: Sequence[Int[Tensor, " _"]]) -> None:
        self._pinned = pinned
        self.slots = places
        """The slot of each id, in the order in which `pin_rows` was given them."""

    def wait(self) -> list[UnwrittenRows]:
        """Until rows are in their slots, but for those that were never written. Raises BackingStoreError where they
        cannot be had; they are near no longer then. To be called once."""
        failed, absent = core().wait_for_rows(self._pinned, torch.get_num_threads())
        if failed:
            raise BackingStoreError(failed[0], failed[1:])
        return [UnwrittenRows(index, torch.from_numpy(rows), torch.from_numpy(slots)) for index, rows, slots in absent]

    def moves(self, index: int) -> CacheMoves:
        """Of one cache, which moves no values."""
        return CacheMoves(*map(torch.from_numpy, core().cache_moves(self._pinned, index)))

    def num_rows(self, index: int) -> tuple[int, int]:
        """Of one cache: distinct rows, and those that did not lie near."""
        return core().num_pinned_rows(self._pinned, index)

    def unpin(self) -> None:
        """The batch is over; its rows count as changed, unless they were to be read alone."""
        core().unpin_rows(self._pinned)


def pin_rows(
    caches: Sequence[RowCache], looked_up: Sequence[tuple[int, Int[Tensor, " _"]]], *, read_only: bool = False
) -> PinnedRows:
    """Keep rows near, and begin to bring those that are not. `looked_up` are rows, each with the index of its cache; a
    row may come twice. Those that are pinned `read_only` are not changed, and push none out.

    Raises CacheFullError where they are more than there are free slots, and BackingStoreError where others cannot be
    pushed out; nothing is pinned then.
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
    """A far side in memory of the caller, who keeps it: records of rows, uint8, and which were ever written."""
    return core().memory_backing_store(records.numpy(), present.numpy())
