"""Tests of cache eviction: the compiled policy chooses the slots that plain Python chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meseta.ops.eviction import GHOST_SCORES_PER_SLOT, HALF_LIVES, MAX_POLICY_BYTES_PER_SLOT, EvictionPolicy
from meseta.ops.eviction.reference import REQUEST_SCORE, SCORE_STEPS, add_scores, choose_victims
from meseta.spec import MesetaError


class Cache:
    """Rows in slots under the compiled policy, with the same policy in lists."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.policy, self.num_rows = EvictionPolicy(num_slots, num_rows), num_rows
        self.rows = torch.full((num_slots,), -1)
        self.scores, self.kept = [0] * num_slots, [0] * min(num_rows, GHOST_SCORES_PER_SLOT * num_slots)
        self.hand = self.num_used = self.num_lookups = 0

    def ask(self, ids: list[int], pinned: list[int]) -> bool:
        """Look up one batch while other batches pin the slots `pinned`. Return whether it fits."""
        rows, num_slots = sorted(set(ids)), len(self.rows)
        place = {int(row): slot for slot, row in enumerate(self.rows.tolist())}
        pins = torch.zeros(num_slots, dtype=torch.int32)
        pins[torch.tensor([*pinned, *(place[row] for row in rows if row in place)], dtype=torch.int64)] += 1
        missing = [row for row in rows if row not in place]
        slots = self.policy.choose_victims(len(missing), self.rows, pins)
        expected = self.chosen(len(missing), pins.tolist())
        assert (None if slots is None else slots.tolist()) == expected
        if slots is None:
            return False
        for slot, row in zip(expected or [], missing, strict=True):
            old = int(self.rows[slot])
            if old >= 0:
                self.kept[old % len(self.kept)] = self.scores[slot]
            self.rows[slot], place[row] = row, slot
        for slot, row in zip(expected or [], missing, strict=True):
            self.scores[slot] = self.kept[row % len(self.kept)]
        self.policy.admit(slots, torch.tensor(missing, dtype=torch.int64))
        now = REQUEST_SCORE + SCORE_STEPS * self.num_lookups // (HALF_LIVES[0] * num_slots)
        for row in rows:
            self.scores[place[row]] = add_scores(self.scores[place[row]], now)
        slots = torch.tensor([place[row] for row in rows], dtype=torch.int64)
        self.policy.touch(slots, torch.tensor(rows, dtype=torch.int64), len(ids))
        self.num_lookups += len(ids)
        while self.num_lookups >= HALF_LIVES[0] * num_slots:
            self.num_lookups -= HALF_LIVES[0] * num_slots
            self.scores, self.kept = ([max(n - SCORE_STEPS, 0) for n in old] for old in (self.scores, self.kept))
        return True

    def chosen(self, count: int, pins: list[int]) -> list[int] | None:
        fresh = min(count, len(pins) - self.num_used)
        old = choose_victims(self.scores[: self.num_used], pins[: self.num_used], count - fresh, self.hand)
        if old is None:
            return None
        slots = [*range(self.num_used, self.num_used + fresh), *old[0]]
        self.hand, self.num_used = old[1] if old[0] else self.hand, self.num_used + fresh
        return slots


@settings(max_examples=40)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    num_slots, num_rows = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 2000))
    cache = Cache(num_slots, num_rows)
    rows = st.integers(0, num_rows - 1) | st.integers(0, min(num_rows, 20) - 1)
    batches = st.lists(st.lists(rows, min_size=1, max_size=60), min_size=1, max_size=20)
    for ids in data.draw(batches):
        cache.ask(ids, data.draw(st.lists(st.integers(0, cache.num_used - 1), max_size=5)) if cache.num_used else [])


def test_a_scan_pushes_out_no_row_that_is_asked_for_often() -> None:
    cache, often = Cache(200, 10_000), list(range(100))
    for number in range(30):
        assert cache.ask(often if number < 10 else [1000 + 50 * number + i for i in range(50)], [])
    assert set(often) <= set(cache.rows.tolist())


def test_rows_that_were_popular_long_ago_are_evicted() -> None:
    cache = Cache(200, 10_000)
    for number in range(60):
        assert cache.ask(
            [i + 500 * (number >= 20) for i in range(100)] + [5000 + 50 * number + i for i in range(50)], []
        )
    assert not set(range(100)) & set(cache.rows.tolist())


@pytest.mark.parametrize(
    "call",
    [
        lambda p: EvictionPolicy(0, 5),
        lambda p: p.touch(torch.tensor([4]), torch.tensor([0]), 1),
        lambda p: p.touch(torch.tensor([-1]), torch.tensor([0]), 1),
        lambda p: p.admit(torch.tensor([4]), torch.tensor([3])),
        lambda p: p.choose_victims(1, torch.arange(3), torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_mismatched_arguments_are_refused(call: Any) -> None:
    with pytest.raises(MesetaError, match="eviction"):
        call(EvictionPolicy(4, 5))


def test_no_slot_with_a_pin_leaves() -> None:
    policy, rows, pins = EvictionPolicy(4, 9), torch.arange(4), torch.zeros(4, dtype=torch.int32)
    assert policy.choose_victims(5, rows, pins) is None
    slots = policy.choose_victims(4, rows, pins)
    assert slots is not None and slots.tolist() == [0, 1, 2, 3]
    pins[torch.tensor([0, 2])] = 1
    assert policy.choose_victims(3, rows, pins) is None
    slots = policy.choose_victims(2, rows, pins)
    assert slots is not None and slots.tolist() == [1, 3]


def misses(num_slots: int, batches: list[torch.Tensor]) -> tuple[int, int]:
    """Return (number of misses, last half-life in lookups per slot) of a cache."""
    policy, rows = EvictionPolicy(num_slots, 10 * num_slots), torch.full((num_slots,), -1)
    slot_of, total = torch.full((10 * num_slots,), -1), 0
    for ids in batches:
        requested = ids.unique()
        missing = requested[slot_of[requested] < 0]
        pins = torch.zeros(num_slots, dtype=torch.int32)
        pins[slot_of[requested][slot_of[requested] >= 0]] = 1
        slots = policy.choose_victims(missing.numel(), rows, pins)
        assert slots is not None and not bool(pins[slots].any())
        slot_of[rows[slots][rows[slots] >= 0]] = -1
        rows[slots], slot_of[missing] = missing, slots
        policy.admit(slots, missing)
        policy.touch(slot_of[requested], requested, ids.numel())
        total += missing.numel()
    assert policy.num_bytes() <= MAX_POLICY_BYTES_PER_SLOT * num_slots
    return total, policy.half_life // num_slots


def test_half_life_adapts_to_changing_popularity() -> None:
    """Ids follow Zipf's law. Popular ids stay the same, or change every 10 batches."""
    num_slots, size = 8192, 8192
    weights = 1 / torch.arange(1, 10 * num_slots + 1, dtype=torch.float64) ** 1.05
    ranks = torch.multinomial(weights, 120 * size, replacement=True, generator=torch.Generator().manual_seed(5))
    still = list(ranks.split(size))
    moving = [(ids + number // 10 * 7000) % (10 * num_slots) for number, ids in enumerate(still)]
    assert misses(num_slots, still)[1] == 16
    assert misses(num_slots, moving)[1] <= 2


@pytest.mark.parametrize("num_slots", [8192, 10_000, 16_383, 1_000_000])
def test_memory_is_bounded(num_slots: int) -> None:
    policy = EvictionPolicy(num_slots, 20 * num_slots)
    assert num_slots * (1 + GHOST_SCORES_PER_SLOT) < policy.num_bytes() <= num_slots * MAX_POLICY_BYTES_PER_SLOT
