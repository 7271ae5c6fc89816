"""Tests of id policies against plain loops over Python integers and published numbers of SplitMix64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.id_policy import POLICIES, apply_id_policy, reference
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import IdPolicy, MesetaError

IDS = st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31)])
WIDE_IDS = IDS | st.sampled_from([2**63 - 1, -(2**63), 2**40, -(2**40)])


MASK = (1 << 64) - 1


def by_hand(
    bags: list[list[list[int]]], num_rows: list[int], policies: list[IdPolicy]
) -> tuple[list[list[list[int]]], list[int], tuple[int, int, int] | None]:
    """Return (bags after the policies, number of invalid ids per feature, first refused id) of bags [F][B][length]."""
    fixed: list[list[list[int]]] = []
    num_outside = [0] * len(bags)
    first: tuple[int, int, int] | None = None
    for f, feature in enumerate(bags):
        fixed.append([])
        for b, bag in enumerate(feature):
            kept = []
            for i in bag:
                if 0 <= i < num_rows[f]:
                    kept.append(i)
                    continue
                num_outside[f] += 1
                if policies[f] == "error":
                    first = first or (f, b, i)
                    kept.append(0)
                elif policies[f] == "clamp":
                    kept.append(0 if i < 0 else num_rows[f] - 1)
                elif policies[f] == "hash":
                    kept.append(mix(i) % num_rows[f])
            fixed[-1].append(kept)
    return fixed, num_outside, first


def mix(i: int) -> int:
    mixed = (i + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return (mixed ^ (mixed >> 31)) & ((1 << 63) - 1)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    num_features, num_samples = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    bag = st.lists(IDS if dtype == torch.int32 else WIDE_IDS, max_size=4)
    bags = [[draw(bag) for _ in range(num_samples)] for _ in range(num_features)]
    num_rows = [draw(st.integers(1, 11)) for _ in range(num_features)]
    policies = [draw(st.sampled_from(["error", "drop", "clamp", "hash"])) for _ in range(num_features)]
    return bags, num_rows, policies, dtype


def to_kjt(bags: list[list[list[int]]], dtype: torch.dtype, length_dtype: torch.dtype) -> KeyedJaggedTensor:
    flat = [bag for feature in bags for bag in feature]
    values = torch.tensor([i for bag in flat for i in bag], dtype=dtype)
    return KeyedJaggedTensor(
        keys=tuple(f"f{f}" for f in range(len(bags))),
        values=values,
        lengths=torch.tensor([len(bag) for bag in flat], dtype=length_dtype),
        weights=torch.arange(values.numel(), dtype=torch.float32),
        batch_sizes=tuple(len(feature) for feature in bags),
    )


def to_bags(kjt: KeyedJaggedTensor, values: torch.Tensor) -> list[list[list[Any]]]:
    pieces = iter(values.split(kjt.lengths.tolist()) if kjt.lengths.numel() else [])
    return [[next(pieces).tolist() for _ in range(size)] for size in kjt.batch_sizes]


@given(given_problem=problems(), length_dtype=st.sampled_from([torch.int32, torch.int64]))
def test_equals_plain_loops(given_problem: tuple[Any, ...], length_dtype: torch.dtype) -> None:
    bags, num_rows, policies, dtype = given_problem
    got = apply_id_policy(to_kjt(bags, dtype, length_dtype), num_rows, policies)
    fixed, num_outside, first = by_hand(bags, num_rows, policies)
    assert got.kjt.values.dtype == (torch.int64 if any(num_outside) else dtype)
    assert to_bags(got.kjt, got.kjt.values) == fixed
    assert got.num_outside.tolist() == num_outside
    assert got.first_error.tolist() == list(first) if first else got.first_error[0] == -1
    for feature, rows in zip(to_bags(got.kjt, got.kjt.values), num_rows, strict=True):
        assert all(0 <= i < rows for bag in feature for i in bag)


def test_weights_of_dropped_ids_are_dropped() -> None:
    kjt = to_kjt([[[0, 9, 1], []], [[9], [2]]], torch.int64, torch.int64)
    got = apply_id_policy(kjt, [3, 3], ["drop", "clamp"])
    assert got.kjt.values.tolist() == [0, 1, 2, 2] and got.kjt.lengths.tolist() == [2, 0, 1, 1]
    assert got.kjt.weights is not None and got.kjt.weights.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert got.num_outside.tolist() == [1, 1]


def test_the_batch_itself_stays_as_it_was() -> None:
    kjt = to_kjt([[[0, 9]]], torch.int64, torch.int64)
    apply_id_policy(kjt, [3], ["clamp"])
    assert kjt.values.tolist() == [0, 9]


def test_the_first_refused_id_is_named_past_empty_bags() -> None:
    kjt = to_kjt([[[], [1], []], [[], [], [2, -7, 50]]], torch.int64, torch.int64)
    assert apply_id_policy(kjt, [3, 3], ["error", "error"]).first_error.tolist() == [1, 2, -7]


# First words of SplitMix64 seeded with 1234567 (the test vector that goes around with Vigna's splitmix64.c).
VIGNA = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


@pytest.mark.parametrize("n", range(len(VIGNA)))
def test_hash_is_splitmix64(n: int) -> None:
    state = (1234567 + n * 0x9E3779B97F4A7C15) & (2**64 - 1)
    signed = state - 2**64 if state >= 2**63 else state
    num_rows = 1_000_003
    if 0 <= signed < num_rows:
        num_rows = 1009
    kjt = to_kjt([[[signed]]], torch.int64, torch.int64)
    got = apply_id_policy(kjt, [num_rows], ["hash"]).kjt.values.item()
    assert got == (VIGNA[n] & (2**63 - 1)) % num_rows


@given(given_problem=problems(), length_dtype=st.sampled_from([torch.int32, torch.int64]))
def test_reference_equals_the_compiled_core(given_problem: tuple[Any, ...], length_dtype: torch.dtype) -> None:
    bags, num_rows, policies, dtype = given_problem
    kjt = to_kjt(bags, dtype, length_dtype)
    counts = torch.ops.meseta.count_outside(kjt.values, list(kjt.key_offsets), num_rows)
    assert torch.equal(counts, reference.count_outside(kjt.values, kjt.key_offsets, num_rows))
    starts = [sum(kjt.batch_sizes[:f]) for f in range(len(bags) + 1)]
    args = (kjt.values, kjt.lengths, starts, num_rows, [POLICIES.index(policy) for policy in policies])
    for got, expected in zip(torch.ops.meseta.fix_ids(*args), reference.fix_ids(*args), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_without_ids_outside_comes_back_itself(dtype: torch.dtype) -> None:
    kjt = to_kjt([[[0, 2], [1]], [[], [3]]], dtype, torch.int64)
    got = apply_id_policy(kjt, [3, 4], ["error", "drop"])
    assert got.kjt is kjt and got.num_outside.tolist() == [0, 0] and got.first_error.tolist() == [-1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 2])
def test_many_ids_on_several_threads(dtype: torch.dtype, count: int) -> None:
    ids = torch.randint(-5, 1000, (100_000,), dtype=dtype)
    bounds, rows = [0, 40_000, 40_000, 99_000], [990, 1, 2**40]
    with use_num_threads(count):
        got = torch.ops.meseta.count_outside(ids, bounds, rows)
    assert torch.equal(got, reference.count_outside(ids, bounds, rows))


def test_wrong_inputs_are_refused() -> None:
    kjt, ids = to_kjt([[[0, 9]]], torch.int64, torch.int64), torch.tensor([0, 9])
    with pytest.raises(MesetaError, match="2 numbers of rows and 1 policies for 1 features"):
        apply_id_policy(kjt, [3, 4], ["clamp"])
    for bounds in ([0, 3], [-1, 2], [2, 1], [0]):
        with pytest.raises(MesetaError, match="bounds"):
            torch.ops.meseta.count_outside(ids, bounds, [3])
    for lengths, first_bags in (([3], [0, 1]), ([-1, 3], [0, 2]), ([2], [0, 2]), ([2], [1, 0])):
        with pytest.raises(MesetaError, match=r"lengths|first_bags"):
            torch.ops.meseta.fix_ids(ids, torch.tensor(lengths), first_bags, [3], [2])
    for lengths in (torch.tensor([2.0]), torch.tensor([[2]])):
        with pytest.raises(MesetaError, match="fix_ids: lengths are"):
            torch.ops.meseta.fix_ids(ids, lengths, [0, 1], [3], [2])


@pytest.mark.parametrize("policy", range(4))
def test_operators_are_registered_as_torch_wants(policy: int) -> None:
    ids = torch.tensor([0, 9, 1])
    torch.library.opcheck(torch.ops.meseta.count_outside.default, (ids, [0, 1, 3], [4, 5]))
    torch.library.opcheck(torch.ops.meseta.fix_ids.default, (ids, torch.tensor([2, 1]), [0, 1, 2], [4, 5], [policy, 2]))
