"""Tests of row caches: decisions equal those of plain Python, and each slot has the values of its row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops.row_cache import (
    EMPTY,
    BackingStoreError,
    CacheFullError,
    PinnedRows,
    RowCache,
    memory_backing_store,
    pin_rows,
)
from meseta.ops.row_cache.reference import ReferenceRowCache
from meseta.spec import MesetaError

NUM_ROWS, TO_READ = 40, 12


class Table:
    """Rows of two values, one of which counts the batches that changed the row. The backing store is in memory."""

    def __init__(self, num_slots: int) -> None:
        self.records = torch.zeros(NUM_ROWS, 12, dtype=torch.uint8)
        self.present = torch.zeros(NUM_ROWS, dtype=torch.bool)
        self.number = torch.zeros(num_slots + TO_READ, dtype=torch.int64)
        self.count = torch.zeros(num_slots + TO_READ, 1, dtype=torch.int32)
        backing_store = memory_backing_store(self.records, self.present)
        self.cache = RowCache(num_slots, TO_READ, NUM_ROWS, backing_store, [self.number, self.count])
        self.reference = ReferenceRowCache(num_slots, NUM_ROWS)
        self.counts = dict.fromkeys(range(NUM_ROWS), 0)
        """Expected count of each row."""
        self.known: set[int] = set()
        """Rows that were changed."""

    def values(self, slots: Tensor) -> list[tuple[int, int]]:
        return list(zip(self.number[slots].tolist(), self.count[slots, 0].tolist(), strict=True))

    def make(self, rows: Tensor, slots: Tensor) -> None:
        assert not self.known & set(rows.tolist())
        self.number[slots], self.count[slots] = rows, 0

    def train(self, rows: list[int], slots: Tensor) -> None:
        """Train one batch, which changes each row once."""
        assert self.values(slots) == [(row, self.counts[row]) for row in rows]
        self.count[slots.unique()] += 1
        for row in set(rows):
            self.counts[row] += 1
        self.known |= set(rows)


def wait(tables: list[Table], pinned: PinnedRows) -> None:
    for absent in pinned.wait():
        tables[absent.cache_index].make(absent.rows, absent.slots)


ids = st.lists(st.integers(0, NUM_ROWS - 1), max_size=9)
batches = st.lists(st.tuples(ids, ids, st.booleans()), max_size=25)


@settings(max_examples=60)
@given(batches=batches, num_slots=st.tuples(st.integers(1, 14), st.integers(9, 30)), ahead=st.integers(0, 2))
def test_values_and_evictions_equal_those_of_plain_python(
    batches: list[tuple[list[int], list[int], bool]], num_slots: tuple[int, int], ahead: int
) -> None:
    """Up to `ahead` further batches are pinned while one is trained."""
    tables = [Table(count) for count in num_slots]
    under_way: list[tuple[list[list[int]], PinnedRows]] = []

    def end_first() -> None:
        rows, pinned = under_way.pop(0)
        wait(tables, pinned)
        for table, ids, slots in zip(tables, rows, pinned.slots, strict=True):
            table.train(ids, slots)
            table.reference.unpin(ids)
        pinned.unpin()

    for first, second, to_read in batches:
        rows = [first, second]
        looked_up = [(index, torch.tensor(ids, dtype=torch.int64)) for index, ids in enumerate(rows)]
        caches = [table.cache for table in tables]
        if to_read:
            for _ in range(len(under_way)):
                end_first()
            pinned = pin_rows(caches, looked_up, read_only=True)
            wait(tables, pinned)
            for table, ids, slots in zip(tables, rows, pinned.slots, strict=True):
                assert table.values(slots) == [(row, table.counts[row]) for row in ids]
            pinned.unpin()
            continue
        fits = [len({*ids, *_needed(under_way, i)}) <= num_slots[i] for i, ids in enumerate(rows)]
        if not all(fits):
            cached = [table.cache.cached_rows() for table in tables]
            with pytest.raises(CacheFullError) as refused:
                pin_rows(caches, looked_up)
            assert not fits[refused.value.cache_index]
            assert all(torch.equal(table.cache.cached_rows(), rows) for table, rows in zip(tables, cached, strict=True))
            while under_way:
                end_first()
            continue
        pinned = pin_rows(caches, looked_up)
        for index, (table, ids) in enumerate(zip(tables, rows, strict=True)):
            expected = table.reference.pin(ids)
            assert expected is not None
            places, missing, _ = expected
            assert pinned.slots[index].tolist() == places
            assert pinned.num_rows(index) == (len(set(ids)), len(missing))
            assert torch.equal(table.cache.rows[: num_slots[index]], table.reference.rows)
        under_way.append((rows, pinned))
        while len(under_way) > ahead:
            end_first()
    while under_way:
        end_first()
    for table in tables:
        assert table.cache.num_pinned == 0
        dirty = table.cache.dirty_slots()
        assert set(table.cache.rows[dirty].tolist()) == table.reference.dirty_rows
        table.cache.write_back(dirty)
        assert table.cache.dirty_slots().numel() == 0
        assert set(table.present.nonzero().flatten().tolist()) == table.known
        kept = table.records[sorted(table.known)]
        assert kept[:, :8].reshape(-1).view(torch.int64).tolist() == sorted(table.known)
        counts = kept[:, 8:].reshape(-1).view(torch.int32).tolist()
        assert counts == [table.counts[row] for row in sorted(table.known)]


def _needed(under_way: list[tuple[list[list[int]], PinnedRows]], index: int) -> set[int]:
    return {row for rows, _ in under_way for row in rows[index]}


def test_rows_of_a_large_batch_on_several_threads() -> None:
    """Several features of one cache share ids."""
    num_rows = 200_000
    records, present = torch.zeros(num_rows, 8, dtype=torch.uint8), torch.ones(num_rows, dtype=torch.bool)
    records[:] = torch.arange(num_rows).view(-1, 1).view(torch.uint8)
    cached = torch.zeros(60_000, dtype=torch.int64)
    cache = RowCache(50_000, 10_000, num_rows, memory_backing_store(records, present), [cached])
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        rows = [torch.randint(0, num_rows, (size,), generator=generator) for size in (9_000, 0, 30_001)]
        rows.append(rows[0] + 0)
        pinned = pin_rows([cache], [(0, ids) for ids in rows], read_only=number == 5 and len(cache.cached_rows()) == 0)
        assert pinned.wait() == []
        for ids, places in zip(rows, pinned.slots, strict=True):
            assert torch.equal(cached[places], ids)
        distinct = torch.cat(rows).unique()
        assert pinned.num_rows(0)[0] == len(distinct) == cache.num_pinned
        assert torch.equal(cache.rows[cache.find(distinct)], distinct)
        pinned.unpin()
    counters = cache.counters
    assert counters.num_lookups == 6 * 48_001 and 0 < counters.num_misses < counters.num_rows
    assert cache.num_pinned == 0


def test_rows_of_a_cache_that_moves_no_values() -> None:
    """The caller that pins rows receives the evicted and fetched rows, as on a GPU."""
    records, present = torch.zeros(9, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.bool)
    cache = RowCache(2, 0, 9, memory_backing_store(records, present))
    pin_rows([cache], [(0, torch.tensor([4, 7, 4]))]).unpin()
    present[3], records[3] = True, 5
    pinned = pin_rows([cache], [(0, torch.tensor([3, 7]))])
    assert pinned.wait() == []
    moved = pinned.moves(0)
    assert moved.evicted_rows.tolist() == [4] and torch.equal(moved.evicted_slots, moved.fetched_slots)
    assert (
        moved.fetched_rows.tolist() == [3] and cache.find(moved.fetched_rows).tolist() == moved.fetched_slots.tolist()
    )
    assert moved.is_written.tolist() == [True] and moved.records.tolist() == [[5] * 8]
    assert cache.find(torch.tensor([4, 7])).tolist()[0] == EMPTY


def test_wrong_calls_are_named() -> None:
    backing_store = memory_backing_store(torch.zeros(9, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.bool))
    cache = RowCache(2, 1, 9, backing_store)
    with pytest.raises(MesetaError, match=r"rows\[1\] is 9, which does not exist"):
        pin_rows([cache], [(0, torch.tensor([1, 9]))])
    with pytest.raises(MesetaError, match="there is no cache 1"):
        pin_rows([cache], [(1, torch.tensor([1]))])
    with pytest.raises(MesetaError, match="cache 1 is given twice"):
        pin_rows([cache, cache], [(0, torch.tensor([1]))])
    with pytest.raises(
        CacheFullError, match="looks up 2 rows, of which 2 are not cached, while other batches need 0 slots"
    ):
        pin_rows([cache], [(0, torch.tensor([1, 2]))], read_only=True)
    with pytest.raises(MesetaError, match="does not have one row per slot"):
        RowCache(2, 1, 9, backing_store, [torch.zeros(2, 8, dtype=torch.uint8)])
    with pytest.raises(MesetaError, match="has 4 bytes in the cache, but 8 in the backing store"):
        RowCache(2, 1, 9, backing_store, [torch.zeros(3, 4, dtype=torch.uint8)])
    with pytest.raises(MesetaError, match="0 slots"):
        RowCache(0, 1, 9, backing_store)
    assert cache.num_pinned == 0 and issubclass(BackingStoreError, MesetaError)
