"""Tests of gradients of per-sample weights against autograd through nn.EmbeddingBag and a dot product by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meseta.measure.threads import use_num_threads
from meseta.ops.weight_gradient import reference, weight_gradient
from meseta.spec import MesetaError


def problem(seed: int, num_samples: int, dims: list[int], dtype: torch.dtype, id_type: torch.dtype) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    tables = [torch.from_numpy(random.normal(size=(random.integers(1, 30), dim))).to(dtype) for dim in dims]
    lengths = [random.integers(0, 6, num_samples) * random.integers(0, 2, num_samples) for _ in dims]
    ids = [
        random.integers(0, table.shape[0], table_lengths.sum())
        for table, table_lengths in zip(tables, lengths, strict=True)
    ]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64))
    gradient = torch.from_numpy(random.normal(size=(num_samples, sum(dims))))
    gradient = gradient.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return tables, torch.from_numpy(np.concatenate(ids)).to(id_type), offsets, gradient


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    dims = draw(st.lists(st.sampled_from([1, 5, 16, 20, 33, 130]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    id_type = draw(st.sampled_from([torch.int32, torch.int64]))
    flags = [draw(st.lists(st.booleans(), min_size=len(dims), max_size=len(dims))) for _ in range(2)]
    return *problem(draw(st.integers(0, 2**32)), draw(st.integers(0, 9)), dims, dtype, id_type), *flags


@given(given_problem=problems())
def test_equals_float64_and_has_the_bits_of_the_reference(given_problem: tuple[Any, ...]) -> None:
    tables, ids, offsets, gradient, weighted, mean = given_problem
    got = weight_gradient(tables, ids, offsets, gradient, weighted, mean)
    assert torch.equal(got, reference.weight_gradient(tables, ids, offsets, gradient, weighted, mean))
    num_samples, exact, column = gradient.shape[0], np.zeros(ids.numel()), 0
    for f, table in enumerate(tables):
        upstream = gradient[:, column : column + table.shape[1]].double().numpy()
        column += table.shape[1]
        for b in range(num_samples if weighted[f] else 0):
            start, stop = offsets[f * num_samples + b : f * num_samples + b + 2].tolist()
            for i in range(start, stop):
                exact[i] = table[int(ids[i])].double().numpy() @ upstream[b] / (stop - start if mean[f] else 1)
    np.testing.assert_allclose(got.double().numpy(), exact, rtol=1e-4, atol=1e-4)


def test_equals_autograd() -> None:
    tables, ids, offsets, gradient = problem(3, 12, [20], torch.float64, torch.int64)
    weights = torch.randn(ids.numel(), dtype=torch.float64, requires_grad=True)
    bag = nn.EmbeddingBag.from_pretrained(tables[0], mode="sum", include_last_offset=True)
    bag(ids, offsets, weights).backward(gradient)
    torch.testing.assert_close(weight_gradient(tables, ids, offsets, gradient, [True]), weights.grad)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_same_bits_for_any_number_of_threads(count: int) -> None:
    args = problem(5, 4000, [16, 50], torch.float32, torch.int64)
    with use_num_threads(count):
        got = weight_gradient(*args, [True, True], [False, True])
    assert torch.equal(got, reference.weight_gradient(*args, [True, True], [False, True]))


def test_block_sums_of_column_shards_add_up_to_the_whole() -> None:
    tables, ids, offsets, gradient = problem(1, 9, [40], torch.float32, torch.int64)
    total = torch.zeros(ids.numel())
    for c in range(0, 40, 16):
        piece = [tables[0][:, c : c + 16].contiguous()]
        total = total + weight_gradient(piece, ids, offsets, gradient[:, c : c + 16], [True])
    assert torch.equal(total, weight_gradient(tables, ids, offsets, gradient, [True]))


def test_wrong_inputs_are_refused() -> None:
    table, ids, gradient = torch.zeros(3, 4), torch.tensor([0, 3]), torch.zeros(2, 4)
    with pytest.raises(MesetaError, match=r"id 3 of feature 0, sample 1, is outside 0\.\.2"):
        weight_gradient([table], ids, torch.tensor([0, 1, 2]), gradient, [True])
    with pytest.raises(MesetaError, match=r"offsets\[2\] is 3"):
        weight_gradient([table], ids, torch.tensor([0, 1, 3]), gradient, [True])
    with pytest.raises(MesetaError, match=r"gradient \[2, 4\] for 1 tables with 4 columns"):
        weight_gradient([table], ids, torch.tensor([0, 1]), gradient, [True])
    with pytest.raises(MesetaError, match="0 flags 'weighted'"):
        weight_gradient([table], ids, torch.tensor([0, 1, 2]), gradient, [])


def test_operator_is_registered_as_torch_wants() -> None:
    tables, ids, offsets, gradient = problem(1, 5, [3, 20], torch.float32, torch.int64)
    torch.library.opcheck(torch.ops.meseta.weight_gradient.default, (tables, ids, offsets, gradient, [1, 3]))
