"""Tests of the row lookup against numpy's indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.row_lookup import reference, row_lookup
from meseta.spec import MesetaError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw tables of any width, some with one row, and features without ids."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype, id_type = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([torch.int32, torch.int64]))
    dims = draw(st.lists(st.sampled_from([1, 3, 15, 16, 17, 40, 130]), min_size=1, max_size=4))
    tables = [torch.from_numpy(random.normal(size=(random.integers(1, 20), dim))).to(dtype) for dim in dims]
    sizes = draw(st.lists(st.integers(0, 30), min_size=len(dims), max_size=len(dims)))
    ids = [random.integers(0, table.shape[0], size) for table, size in zip(tables, sizes, strict=True)]
    return tables, torch.from_numpy(np.concatenate(ids)).to(id_type), [0, *np.cumsum(sizes).tolist()]


@given(problem=problems())
def test_equals_numpy_and_reference(problem: tuple[Any, ...]) -> None:
    tables, ids, bounds = problem
    got, plain = row_lookup(tables, ids, bounds), reference.row_lookup(tables, ids, bounds)
    for f, table in enumerate(tables):
        expected = table.double().numpy()[ids[bounds[f] : bounds[f + 1]].numpy()]
        assert got[f].dtype == (torch.float64 if table.dtype == torch.float64 else torch.float32)
        assert np.array_equal(got[f].double().numpy(), expected) and torch.equal(got[f], plain[f])


def test_ids_between_the_bounds_alone_are_read() -> None:
    got = row_lookup([torch.tensor([[1.0], [2.0]])], torch.tensor([99, 1, 0, -5]), [1, 3])
    assert [rows.tolist() for rows in got] == [[[2.0], [1.0]]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_ids_on_several_threads(count: int) -> None:
    tables = [torch.randn(1000, 16), torch.randn(70, 5)]
    ids = torch.cat([torch.randint(1000, (30_000,)), torch.randint(70, (20_000,))])
    with use_num_threads(count):
        got = row_lookup(tables, ids, [0, 30_000, 50_000])
    assert torch.equal(got[0], tables[0][ids[:30_000]]) and torch.equal(got[1], tables[1][ids[30_000:]])


@pytest.mark.parametrize("bad", [3, -1, 2**40, -(2**63)])
def test_an_id_outside_names_its_table_and_place(bad: int) -> None:
    ids = torch.zeros(20_000, dtype=torch.int64)
    ids[15_000:] = 4  # after the first mistake, and one as well
    ids[12_345] = bad
    with (
        use_num_threads(2),
        pytest.raises(MesetaError, match=rf"row_lookup: id {bad} for table 1, at position 2345 of its ids, .* 0\.\.2"),
    ):
        row_lookup([torch.zeros(1, 4), torch.zeros(3, 4)], ids, [0, 10_000, 20_000])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [([0, 3, 2], r"bounds\[1\] is 3"), ([0, 2, 1], r"bounds\[2\] is 1"), ([-1, 0, 1], "is -1"), ([0, 1], "F \\+ 1")],
)
def test_wrong_bounds_are_refused(bounds: list[int], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        row_lookup([torch.zeros(2, 3)] * 2, torch.tensor([0, 1]), bounds)


def test_tables_and_ids_of_other_types_are_refused() -> None:
    with pytest.raises(MesetaError, match=r"table 1 is torch\.float16"):
        row_lookup([torch.zeros(2, 3), torch.zeros(2, 3).half()], torch.tensor([0, 1]), [0, 1, 2])
    with pytest.raises(MesetaError, match=r"ids are torch\.int16"):
        torch.ops.meseta.row_lookup([torch.zeros(2, 3)], torch.zeros(2, dtype=torch.int16), [0, 2])


def test_no_tables() -> None:
    assert row_lookup([], torch.zeros(0, dtype=torch.int64), [0]) == []


def test_operator_is_registered_as_torch_wants() -> None:
    args = ([torch.randn(4, 3), torch.randn(2, 20)], torch.tensor([3, 0, 1]), [0, 2, 3])
    torch.library.opcheck(torch.ops.meseta.row_lookup.default, args)
