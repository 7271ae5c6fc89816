"""Id policies against plain loops over Python integers, and the published numbers of SplitMix64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.jagged import KeyedJaggedTensor
from meseta.ops.id_policy import apply_id_policy, reference

IDS = st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31)])
WIDE_IDS = IDS | st.sampled_from([2**63 - 1, -(2**63), 2**40, -(2**40)])


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
def test_equals_reference(given_problem: tuple[Any, ...], length_dtype: torch.dtype) -> None:
    bags, num_rows, policies, dtype = given_problem
    got = apply_id_policy(to_kjt(bags, dtype, length_dtype), num_rows, policies)
    fixed, num_outside, first = reference.apply_id_policy(bags, num_rows, policies)
    assert got.kjt.values.dtype == torch.int64
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
