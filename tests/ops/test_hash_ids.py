"""Tests of id hashes against published numbers of SplitMix64, the xxhash package and Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.hash_ids import HashMethod, hash_ids, reference
from meseta.spec import MesetaError

# First words of SplitMix64 seeded with 1234567 (the test vector that goes around with Vigna's splitmix64.c).
VIGNA = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]

SIZES = st.integers(1, 2**63 - 1) | st.sampled_from([1, 2, 1000, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1])
SEEDS = st.integers(0, 2**64 - 1)
METHODS: list[HashMethod] = ["splitmix64", "xxh64"]


@pytest.mark.parametrize("n", range(len(VIGNA)))
@pytest.mark.parametrize("num_rows", [2**63 - 1, 2**62, 1000])
def test_splitmix64_is_the_published_one(n: int, num_rows: int) -> None:
    assert hash_ids(torch.tensor([1234567]), num_rows, seed=n).tolist() == [VIGNA[n] * num_rows >> 64]


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), num_rows=SIZES, seed=SEEDS)
def test_xxh64_is_that_of_the_package(ids: list[int], num_rows: int, seed: int) -> None:
    expected = [xxhash.xxh64_intdigest(i.to_bytes(8, "little", signed=True), seed=seed) * num_rows >> 64 for i in ids]
    assert hash_ids(torch.tensor(ids, dtype=torch.int64), num_rows, seed, "xxh64").tolist() == expected


@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    num_rows=SIZES,
    seed=SEEDS,
    method=st.sampled_from(METHODS),
)
def test_equals_reference_for_both_types_of_ids(ids: list[int], num_rows: int, seed: int, method: HashMethod) -> None:
    narrow = hash_ids(torch.tensor(ids, dtype=torch.int32), num_rows, seed, method)
    wide = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(narrow, hash_ids(wide, num_rows, seed, method))
    assert torch.equal(narrow, reference.hash_ids(wide, num_rows, seed, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [1000, 2**40])
def test_rows_are_even_and_the_same_on_all_threads(method: HashMethod, num_rows: int) -> None:
    ids = torch.arange(100_000)
    rows = hash_ids(ids, num_rows, 7, method)
    with use_num_threads(2):
        assert torch.equal(hash_ids(ids, num_rows, 7, method), rows)
    counts = np.bincount(rows.numpy() * 100 // num_rows, minlength=100)
    # Chi-square with 99 degrees of freedom: 160 has a chance of 1e-4.
    assert ((counts - 1000) ** 2 / 1000).sum() < 160
    assert (rows == hash_ids(ids, num_rows, 8, method)).float().mean() < 0.01


def test_wrong_inputs_are_refused() -> None:
    ids = torch.tensor([1])
    with pytest.raises(MesetaError, match="num_rows must be in"):
        hash_ids(ids, 0)
    with pytest.raises(MesetaError, match="seed must be in"):
        hash_ids(ids, 1, -1)


def test_operator_is_registered_as_torch_wants() -> None:
    torch.library.opcheck(torch.ops.meseta.hash_ids.default, (torch.arange(5), 10, 3, "xxh64"))
