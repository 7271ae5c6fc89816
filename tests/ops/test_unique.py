"""Tests of distinct ids against torch.unique and numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.unique import reference, unique
from meseta.spec import MesetaError

WIDE = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63 - 1, -(2**63), 0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    narrow = draw(st.booleans())
    numbers = st.integers(-3, 3) | (st.integers(-(2**31), 2**31 - 1) if narrow else WIDE)
    groups = draw(st.lists(st.lists(numbers, max_size=60), min_size=1, max_size=4))
    ids = torch.tensor([i for group in groups for i in group], dtype=torch.int32 if narrow else torch.int64)
    return ids, [0, *np.cumsum([len(group) for group in groups]).tolist()]


@given(problem=problems())
def test_equals_numpy_group_by_group(problem: tuple[Any, ...]) -> None:
    ids, bounds = problem
    got = unique(ids, bounds)
    first = got.bounds.tolist()
    assert first[0] == 0 and first[-1] == got.rows.numel() == got.counts.numel()
    for g, (start, stop) in enumerate(pairwise(bounds)):
        rows, inverse, counts = np.unique(ids[start:stop].numpy(), return_inverse=True, return_counts=True)
        group = slice(first[g], first[g + 1])
        assert got.rows[group].tolist() == rows.tolist() and got.counts[group].tolist() == counts.tolist()
        assert got.inverse[start:stop].tolist() == (inverse + first[g]).tolist()
    plain = reference.unique(ids, bounds)
    assert all(torch.equal(a, b) for a, b in zip((got.rows, got.inverse, got.counts, got.bounds), plain, strict=True))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 50, 2**40])
def test_many_ids_equal_torch_unique(count: int, num_rows: int) -> None:
    ids = torch.randint(num_rows, (50_000,))
    with use_num_threads(count):
        got = unique(ids)
    rows, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    assert torch.equal(got.rows, rows) and torch.equal(got.inverse, inverse) and torch.equal(got.counts, counts)


@pytest.mark.parametrize("bounds", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 4], []])
def test_wrong_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(MesetaError, match="unique: bounds"):
        unique(torch.tensor([1, 2, 3]), bounds)


def test_operator_is_registered_as_torch_wants() -> None:
    torch.library.opcheck(torch.ops.meseta.unique.default, (torch.tensor([5, 2, 5, 5, 1]), [0, 3, 5]))
