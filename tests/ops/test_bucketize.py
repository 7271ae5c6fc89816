"""Tests of bucketize against plain loops over Python integers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.measure.threads import use_num_threads
from meseta.ops.bucketize import bucketize, bucketize_features, reference
from meseta.spec import MesetaError

INTS = st.sampled_from([torch.int32, torch.int64])
MASK = 2**64 - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def by_hand(
    ids: list[int], lengths: list[int], owners: list[int] | int
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return (local ids, ids per (owner, sample), order) of one feature."""
    sample_of = [b for b, length in enumerate(lengths) for _ in range(length)]
    if isinstance(owners, int):
        placed = [((i + (mix(i // owners) * owners >> 64)) % owners, i // owners) for i in ids]
        num_owners = owners
    else:
        ranges = list(enumerate(pairwise(owners)))
        placed = [next((n, i - start) for n, (start, stop) in ranges if start <= i < stop) for i in ids]
        num_owners = len(ranges)
    local, counts, order = [], [[0] * len(lengths) for _ in range(num_owners)], []
    for n in range(num_owners):
        for position, (owner, row) in enumerate(placed):
            if owner == n:
                local.append(row)
                counts[n][sample_of[position]] += 1
                order.append(position)
    return local, counts, order


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[list[int] | int]]:
    """Draw features with up to 40 row ranges, some of them empty, and features with hash classes."""
    num_samples, owners, ids, lengths = draw(st.integers(0, 5)), [], [], []
    for _ in range(draw(st.integers(1, 4))):
        lengths_of_feature = [draw(st.integers(0, 4)) for _ in range(num_samples)]
        if draw(st.booleans()):
            owner: Any = draw(st.integers(1, 7))
            top = 10**6
        else:
            owner = [0, *sorted(draw(st.lists(st.integers(1, 60), min_size=1, max_size=40)))]
            top = owner[-1] - 1
        owners.append(owner)
        lengths += lengths_of_feature
        ids += draw(st.lists(st.integers(0, top), min_size=sum(lengths_of_feature), max_size=sum(lengths_of_feature)))
    return torch.tensor(ids, dtype=draw(INTS)), torch.tensor(lengths, dtype=draw(INTS)), owners


@given(problem=problems())
def test_equals_plain_loops_and_reference(problem: tuple[Any, ...]) -> None:
    ids, lengths, owners = problem
    got = bucketize_features(ids, lengths, owners)
    num_samples, at, local, counts, order = lengths.numel() // len(owners), 0, [], [], []
    for f, owner in enumerate(owners):
        feature_lengths = lengths[f * num_samples : (f + 1) * num_samples].tolist()
        expected = by_hand(ids[at : at + sum(feature_lengths)].tolist(), feature_lengths, owner)
        local += expected[0]
        counts += expected[1]
        order += [at + position for position in expected[2]]
        at += sum(feature_lengths)
    assert got.ids.tolist() == local and got.ids.dtype == ids.dtype
    assert got.lengths.tolist() == counts and got.lengths.dtype == lengths.dtype
    assert got.order.tolist() == order and got.totals.tolist() == [sum(row) for row in counts]
    cuts = [[owner] if isinstance(owner, int) else owner for owner in owners]
    plain = reference.bucketize(
        ids, lengths, [c for feature_cuts in cuts for c in feature_cuts], [len(feature_cuts) for feature_cuts in cuts]
    )
    for a, b in zip((got.ids, got.lengths, got.order, got.totals), plain, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_the_example_of_the_docstring() -> None:
    local, counts, order = bucketize(torch.tensor([5, 1, 7]), torch.tensor([2, 1]), [0, 4, 8])
    assert (local.tolist(), counts.tolist(), order.tolist()) == ([1, 1, 3], [[1, 0], [1, 1]], [1, 0, 2])


@given(num_owners=st.integers(1, 9), block=st.integers(0, 2**40))
def test_hash_classes_share_out_each_block_of_ids(num_owners: int, block: int) -> None:
    ids = torch.arange(block * num_owners, (block + 1) * num_owners)
    owner, row = reference.assign_owners(ids, [num_owners])
    assert sorted(owner.tolist()) == list(range(num_owners)) and row.tolist() == [block] * num_owners


def test_hash_classes_are_even_for_ids_with_a_pattern() -> None:
    owner, _ = reference.assign_owners(
        torch.arange(0, 80_000, 8), [4]
    )  # a plain modulo would give them all to one owner
    assert owner.bincount(minlength=4).sub(2500).abs().max() < 250


@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_ids_on_several_threads(count: int) -> None:
    lengths = torch.randint(0, 5, (30_000,))
    ids = torch.randint(0, 1000, (int(lengths.sum()),))
    with use_num_threads(count):
        got = bucketize_features(ids, lengths, [[0, 300, 1000], 3, [0, 1000]])
    plain = reference.bucketize(ids, lengths, [0, 300, 1000, 3, 0, 1000], [3, 1, 2])
    assert all(torch.equal(a, b) for a, b in zip((got.ids, got.lengths, got.order, got.totals), plain, strict=True))


@pytest.mark.parametrize(
    ("ids", "lengths", "owners", "message"),
    [
        ([0, 8], [1, 1], [[0, 4, 8]], r"id 8 of feature 0, at position 1, is outside the rows 0\.\.7"),
        ([0, -1], [2], [[0, 4]], "id -1"),
        ([3, -1], [1, 1], [[0, 4], 2], r"id -1 of feature 1, at position 1, is outside 0 and above"),
        ([0, 1], [1, 2], [[0, 4]], r"lengths\[1\] is 2"),
        ([0, 1], [3, -1], [[0, 4]], r"lengths\[0\] is 3"),
        ([0, 1], [-1, 3], [[0, 4]], r"lengths\[0\] is -1"),
        ([0, 1], [1], [[0, 4]], "add up to 1, but there are 2 ids"),
        ([0, 1], [2], [[0, 4, 2]], "decrease from 4 to 2"),
        ([0, 1], [2], [0], "has 0 owners"),
        ([0, 1], [2], [[0]], "at least one row range"),
        ([0, 1], [2], [2, 2], "1 lengths of torch.int64 for 2 features"),
    ],
)
def test_wrong_inputs_are_refused(ids: list[int], lengths: list[int], owners: list[Any], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        bucketize_features(torch.tensor(ids), torch.tensor(lengths), owners)


def test_operator_is_registered_as_torch_wants() -> None:
    args = (torch.tensor([5, 1, 7, 2]), torch.tensor([2, 1, 0, 1]), [0, 4, 8, 3], [3, 1])
    torch.library.opcheck(torch.ops.meseta.bucketize.default, args)
