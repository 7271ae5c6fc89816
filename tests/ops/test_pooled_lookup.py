"""Pooled lookup against its reference, numpy and torch's own modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meseta.ops.pooled_lookup import pooled_lookup, reference


def problem(seed: int, num_samples: int, dims: list[int], dtype: torch.dtype, weighted: list[bool]) -> tuple[Any, ...]:
    """Arguments of pooled_lookup; every third bag or so is empty."""
    random = np.random.default_rng(seed)
    tables, lengths, ids = [], [], []
    for dim in dims:
        rows = int(random.integers(1, 30))
        tables.append(torch.from_numpy(random.normal(size=(rows, dim))).to(dtype))
        length = random.integers(0, 7, num_samples) * random.integers(0, 2, num_samples)
        lengths.append(length)
        ids.append(random.integers(0, rows, length.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64))
    values = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    weights = torch.from_numpy(random.normal(size=values.numel())).float() if any(weighted) else None
    return tables, values, offsets, weights, weighted


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    num_features = draw(st.integers(1, 4))
    return problem(
        draw(st.integers(0, 2**32)),
        draw(st.integers(0, 9)),
        draw(st.lists(st.sampled_from([1, 3, 16, 20, 33]), min_size=num_features, max_size=num_features)),
        draw(st.sampled_from([torch.float32, torch.float64])),
        draw(st.lists(st.booleans(), min_size=num_features, max_size=num_features)),
    )


def by_hand(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, weighted: list[bool]) -> Any:
    """Float64 sums in numpy."""
    num_samples = (offsets.numel() - 1) // len(tables)
    pooled = []
    for f, table in enumerate(tables):
        out = np.zeros((num_samples, table.shape[1]))
        for b in range(num_samples):
            for i in range(int(offsets[f * num_samples + b]), int(offsets[f * num_samples + b + 1])):
                factor = float(weights[i]) if weights is not None and weighted[f] else 1.0
                out[b] += factor * table[int(ids[i])].double().numpy()
        pooled.append(out)
    return np.concatenate(pooled, axis=1)


@given(given_problem=problems())
def test_equals_reference_and_numpy(given_problem: tuple[Any, ...]) -> None:
    tables, ids, offsets, weights, weighted = given_problem
    got = pooled_lookup(tables, ids, offsets, weights, weighted)
    plain = reference.pooled_lookup(tables, ids, offsets, weights, weighted)
    exact = torch.from_numpy(by_hand(tables, ids, offsets, weights, weighted))
    assert got.shape == plain.shape == exact.shape and got.dtype == plain.dtype == tables[0].dtype
    if not got.numel():
        return
    # The kernel may err at most twice as much as the reference in the same precision, plus one unit in the last place.
    ulp = torch.finfo(got.dtype).eps * float(exact.abs().max())
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + ulp


@given(given_problem=problems())
def test_unweighted_sums_have_the_bits_of_the_reference(given_problem: tuple[Any, ...]) -> None:
    tables, ids, offsets, *_ = given_problem
    got = pooled_lookup(tables, ids, offsets)
    assert torch.equal(got, reference.pooled_lookup(tables, ids, offsets))


@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(17, 70),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    weighted=st.booleans(),
)
def test_columns_of_a_shard_have_the_bits_of_the_whole(seed: int, dim: int, dtype: torch.dtype, weighted: bool) -> None:
    # Column shards start at multiples of 16; the last one may have any width.
    tables, ids, offsets, weights, flags = problem(seed, 8, [dim], dtype, [weighted])
    whole = pooled_lookup(tables, ids, offsets, weights, flags)
    for start in range(0, dim, 16):
        piece = tables[0][:, start : start + 16].contiguous()
        got = pooled_lookup([piece], ids, offsets, weights, flags)
        assert torch.equal(got, whole[:, start : start + 16])


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_nn_embedding_bag(weighted: bool) -> None:
    tables, ids, offsets, weights, flags = problem(1, 12, [20], torch.float64, [weighted])
    bag = nn.EmbeddingBag.from_pretrained(tables[0], mode="sum", include_last_offset=True)
    expected = bag(ids, offsets, weights.double() if weighted else None)
    torch.testing.assert_close(pooled_lookup(tables, ids, offsets, weights, flags), expected)


def test_weights_of_other_features_are_not_read() -> None:
    tables = [torch.ones(2, 1), torch.ones(2, 1)]
    ids, offsets = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    weights = torch.tensor([torch.nan, 3.0])
    got = pooled_lookup(tables, ids, offsets, weights, [False, True])
    assert got.tolist() == [[1.0, 3.0]]


def test_no_samples_and_only_empty_bags() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    tables = [torch.ones(2, 3), torch.ones(4, 5)]
    assert pooled_lookup(tables, empty, torch.zeros(1, dtype=torch.int64)).shape == (0, 8)
    assert torch.equal(pooled_lookup(tables, empty, torch.zeros(5, dtype=torch.int64)), torch.zeros(2, 8))
