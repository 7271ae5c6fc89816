"""Bucketize against plain loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.ops.bucketize import bucketize, reference


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=5)))]
    lengths = draw(st.lists(st.integers(0, 5), min_size=0, max_size=7))
    ids = draw(st.lists(st.integers(0, cuts[-1] - 1), min_size=sum(lengths), max_size=sum(lengths)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(lengths, dtype=dtype), cuts


@given(given_problem=problems())
def test_equals_reference(given_problem: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    for got, expected in zip(bucketize(*given_problem), reference.bucketize(*given_problem), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@given(given_problem=problems())
def test_every_id_arrives_once(given_problem: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    ids, lengths, cuts = given_problem
    local, counts, order = bucketize(ids, lengths, cuts)
    assert counts.sum(0).tolist() == lengths.tolist()
    first = torch.repeat_interleave(torch.tensor(cuts[:-1]), counts.sum(1).long())
    assert torch.equal(torch.empty_like(ids).index_copy_(0, order, local + first), ids)
    assert order.sort().values.tolist() == list(range(ids.numel()))


def test_the_example_of_the_docstring() -> None:
    local, counts, order = bucketize(torch.tensor([5, 1, 7]), torch.tensor([2, 1]), [0, 4, 8])
    assert (local.tolist(), counts.tolist(), order.tolist()) == ([1, 1, 3], [[1, 0], [1, 1]], [1, 0, 2])
