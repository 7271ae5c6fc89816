"""Tests of the slot map against a dict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.slot_map import NOT_FOUND, SlotMap
from meseta.ops.slot_map.reference import ReferenceSlotMap
from meseta.spec import MesetaError

KEYS = st.one_of(st.integers(-8, 8), st.integers(-(2**63), 2**63 - 1))
BATCHES = st.lists(st.tuples(st.sampled_from(["find", "insert", "remove"]), st.lists(KEYS, max_size=40)), max_size=12)


@given(BATCHES, st.integers(0, 20), st.booleans())
def test_equals_a_dict(batches: list[tuple[str, list[int]]], capacity: int, wide: bool) -> None:
    directory = SlotMap(capacity, max_slot=2**62 if wide else 2**32 - 2)
    expected, slot = ReferenceSlotMap(), 0
    for action, listed in batches:
        keys = torch.tensor(listed, dtype=torch.int64)
        if action == "insert":
            slots = torch.arange(slot, slot + len(listed))
            slot += len(listed)
            assert directory.insert(keys, slots) == expected.insert(keys, slots)
        else:
            assert getattr(directory, action)(keys).tolist() == getattr(expected, action)(keys).tolist()
        assert len(directory) == len(expected)
    keys, slots = directory.items()
    order = torch.argsort(keys)
    assert [keys[order].tolist(), slots[order].tolist()] == [part.tolist() for part in expected.items()]


@pytest.mark.parametrize("capacity", [0, 100, 200_000])
def test_large_batches_on_any_number_of_threads(capacity: int) -> None:
    """Keys and slots are the same for any number of threads after many insertions and removals."""
    generator, results = torch.Generator().manual_seed(3), []
    rounds = [torch.randint(-(2**62), 2**62, (60_000,), generator=generator) for _ in range(2)]
    for count in (1, 2, 5):
        with use_num_threads(count):
            directory, expected = SlotMap(capacity), ReferenceSlotMap()
            for number, keys in enumerate(rounds):
                twice = torch.cat([keys, keys[::7]])
                slots = torch.arange(len(twice)) + number
                assert directory.insert(twice, slots) == expected.insert(twice, slots)
                assert directory.remove(keys[::2]).tolist() == expected.remove(keys[::2]).tolist()
            probe = torch.cat(rounds)
            assert directory.find(probe).tolist() == expected.find(probe).tolist()
            results.append(torch.stack(directory.items()))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_size_stays_constant() -> None:
    """A million pairs of insert and remove leave the size unchanged."""
    directory = SlotMap(1000)
    before = directory.num_bytes()
    for first in range(0, 1_000_000, 1000):
        keys = torch.arange(first, first + 1000)
        directory.insert(keys, keys % 1000)
        assert int((directory.remove(keys) == NOT_FOUND).sum()) == 0
    assert len(directory) == 0 and directory.num_bytes() == before


def test_wrong_calls_are_named() -> None:
    directory, one = SlotMap(4), torch.tensor([1])
    for call, message in (
        (lambda: directory.insert(one, torch.tensor([-1])), r"slots are -1\.\.-1"),
        (lambda: directory.insert(one, torch.tensor([2**32])), r"must be in 0\.\.4294967294"),
        (lambda: directory.insert(one, torch.tensor([1, 2])), "1 keys and 2 slots"),
        (lambda: directory.find(one.int()), "pass int64"),
        (lambda: SlotMap(-1), "capacity -1 is out of range"),
        (lambda: SlotMap(1, max_slot=2**63), "max_slot 9223372036854775808 is out of range"),
    ):
        with pytest.raises(MesetaError, match=message):
            call()
    assert len(directory) == 0
