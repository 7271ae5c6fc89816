"""Tests of KeyedJaggedTensor.from_arrow against lists of Python."""

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError

INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> tuple[pa.ChunkedArray, list[list[int]]]:
    """Draw a column in a few chunks, and the bag of each row."""
    ids_type = draw(st.sampled_from(INTEGERS))
    ids = st.integers(0, 2 ** min(63, ids_type.bit_width - 1) - 1)
    kind = draw(st.sampled_from(["single", "list", "large_list", "fixed", "missing"]))
    if kind == "missing":
        return pa.chunked_array([pa.nulls(num_rows)]), [[]] * num_rows
    cell_type, cell = {
        "single": (ids_type, ids),
        "list": (pa.list_(ids_type), st.lists(ids, max_size=3)),
        "large_list": (pa.large_list(ids_type), st.lists(ids, max_size=3)),
        "fixed": (pa.list_(ids_type, 2), st.lists(ids, min_size=2, max_size=2)),
    }[kind]
    # Rows before and after the column check that offsets of slices are respected.
    before = draw(st.integers(0, 2))
    cells = draw(st.lists(st.none() | cell, min_size=num_rows + before, max_size=num_rows + before))
    cut = draw(st.integers(0, num_rows))
    whole = pa.array(cells, cell_type)
    column = pa.chunked_array([whole.slice(before, cut), whole.slice(before + cut)], cell_type)
    bags = [[] if c is None else [c] if kind == "single" else list(c) for c in cells[before:]]
    return column, bags


@given(st.data(), st.integers(0, 5))
def test_columns_are_bags(data: st.DataObject, num_rows: int) -> None:
    names = data.draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1))
    drawn = {name: data.draw(columns(num_rows)) for name in names}
    table = pa.table({name: column for name, (column, _) in drawn.items()})
    features = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
    batch = KeyedJaggedTensor.from_arrow(table, features)
    bags = [bag for name in features for bag in drawn[name][1]]
    assert batch.keys == tuple(features) and batch.batch_sizes == (num_rows,) * len(features)
    assert batch.values.tolist() == [i for bag in bags for i in bag] and batch.lengths.tolist() == list(map(len, bags))
    assert batch.values.dtype == batch.lengths.dtype == torch.int64 and batch.weights is None


class Exported:
    """Table of another library, which has only the Arrow C stream interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_tables_of_other_libraries() -> None:
    table = pa.table({"user": [1, None, 3], "tags": [[4], [], [5, 6]]})
    tables: list[Any] = [table, table.to_batches()[0], Exported(table)]
    try:
        import polars

        tables.append(polars.from_arrow(table))
    except ImportError:
        pass
    for each in tables:
        batch = KeyedJaggedTensor.from_arrow(each, ["tags", "user"])
        assert (batch.values.tolist(), batch.lengths.tolist()) == ([4, 5, 6, 1, 3], [1, 0, 2, 1, 0, 1])


TABLE = pa.table(
    {
        "user": [1, 2],
        "name": ["x", "y"],
        "score": [[0.5], [1.5]],
        "holes": [[1, None], [2]],
        "large": pa.array([1, 2**63], pa.uint64()),
    }
)


@pytest.mark.parametrize(
    ("table", "features", "words"),
    [
        (TABLE, ["usr"], ["no column 'usr'; did you mean 'user'?"]),
        (TABLE, ["user", "user"], ["features ['user', 'user'] name a feature twice"]),
        (TABLE, "user", ["features must be a sequence of names", "give ['user']"]),
        (TABLE, ["name"], ["column 'name' has type string", "cast it"]),
        (TABLE, ["score"], ["column 'score' has type list<", "double", "lists of integers"]),
        (TABLE, ["holes"], ["column 'holes' has 1 null ids inside lists", "remove them"]),
        (TABLE, ["large"], ["column 'large' has an id that does not fit into int64", "modulo"]),
        (pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"]), ["a"], ["2 columns 'a'", "rename"]),
        ({"user": [1]}, ["user"], ["expected an Arrow table, got dict", "pyarrow Table"]),
    ],
)
def test_refused_tables(table: Any, features: Any, words: list[str]) -> None:
    with pytest.raises(MesetaError) as caught:
        KeyedJaggedTensor.from_arrow(table, features)
    assert str(caught.value).startswith("KeyedJaggedTensor.from_arrow: ")
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_table_that_cannot_be_converted() -> None:
    class Broken:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            raise ValueError("mixed types")

    with pytest.raises(MesetaError, match=r"cannot convert Broken to an Arrow table \(mixed types\); give"):
        KeyedJaggedTensor.from_arrow(Broken(), ["user"])


def test_importing_the_package_imports_no_pyarrow() -> None:
    program = "import sys, meseta.sparse; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
