"""Rows in memory are spooled to the same file, whatever holds them, and predictions come back in their form."""

from __future__ import annotations

import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.api import rows
from meseta.errors import MesetaError


def make_table(num_rows: int = 20) -> pa.Table:
    """Return a table with columns of six kinds, and nulls."""
    draw = np.random.default_rng(3)
    texts = pa.array([None if i % 7 == 0 else f"city{i % 4}" for i in range(num_rows)])
    return pa.table(
        {
            "clicked": pa.array(draw.random(num_rows) < 0.3),
            "user": pa.array(draw.integers(0, 9, num_rows)),
            "price": pa.array(draw.random(num_rows).astype(np.float32)),
            "city": texts,
            "tags": pa.array([draw.integers(0, 9, i % 3).tolist() for i in range(num_rows)], pa.list_(pa.int64())),
            "when": pa.array(np.arange(num_rows).astype("datetime64[ms]")),
        }
    )


def batches_of(table: pa.Table, size: int) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=size))


def polars_frame(table: pa.Table) -> Any:
    return pytest.importorskip("polars").from_arrow(table)


def duckdb_relation(table: pa.Table) -> Any:
    return pytest.importorskip("duckdb").from_arrow(table)


def pandas_frame(table: pa.Table) -> Any:
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    return frame.set_axis(frame.index[::-1])


def encode_city(table: pa.Table) -> pa.Table:
    """Return a table whose column "city", if it is text, is a dictionary."""
    index = table.column_names.index("city") if "city" in table.column_names else -1
    if index < 0 or not pa.types.is_string(table.schema.field(index).type):
        return table
    return table.set_column(index, "city", table["city"].dictionary_encode())


KINDS: dict[str, Callable[[pa.Table], Any]] = {
    "pyarrow table": lambda table: table,
    "record batch": lambda table: table.to_batches()[0],
    "stream": lambda table: batches_of(table, 7),
    "dict": lambda table: {name: table[name] for name in table.column_names},
    "categories": encode_city,
    "pandas": pandas_frame,
    "polars": polars_frame,
    "polars categories": lambda table: polars_frame(encode_city(table)),
    "DuckDB": duckdb_relation,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_have_the_values_of_a_file(kind: str, tmp_path: Path) -> None:
    table = make_table()
    path = rows.spool_rows(rows.open_stream(KINDS[kind](table)), tmp_path / "spool")
    read = pq.read_table(path)
    assert read.column_names == table.column_names
    assert read.to_pylist() == table.to_pylist()
    assert list(path.parent.iterdir()) == [path]


@given(st.integers(0, 40), st.integers(1, 50), st.integers(1, 50))
def test_the_file_does_not_depend_on_batches(num_rows: int, size: int, block: int) -> None:
    table = make_table(num_rows + 1)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(rows, "BLOCK_ROWS", block)
        first = rows.spool_rows(rows.open_stream(table), Path(folder, "a"))
        second = rows.spool_rows(batches_of(table, size), Path(folder, "b"))
        assert first.name == second.name and first.stat().st_mtime == second.stat().st_mtime
        assert first.read_bytes() == second.read_bytes()
        other = table.set_column(1, "user", pa.array(np.arange(num_rows + 1) + 10))
        assert rows.spool_rows(rows.open_stream(other), Path(folder, "a")).name != first.name


def test_values_of_nulls_do_not_matter(tmp_path: Path) -> None:
    known = pa.py_buffer(bytes([0b101]))
    names = set()
    for hidden in (2, 9):
        column = pa.Array.from_buffers(pa.int64(), 3, [known, pa.py_buffer(np.array([1, hidden, 3]))])
        assert column.to_pylist() == [1, None, 3]
        names.add(rows.spool_rows(rows.open_stream({"a": column}), tmp_path).name)
    assert len(names) == 1


def failing_stream(table: pa.Table) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(max_chunksize=5)
        raise OSError("the database is gone")

    return pa.RecordBatchReader.from_batches(table.schema, batches())


def test_rows_that_cannot_be_stored_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table()
    cases = [
        (7, "int has no rows"),
        ({"a": [1, 2], "b": [1]}, "dict cannot be converted to Arrow"),
        ({"a": [1, "x"]}, "dict cannot be converted to Arrow"),
        (table.slice(0, 0), "there are no rows"),
        (pa.table({"a": pa.array([None], pa.month_day_nano_interval())}), "cannot be stored as Parquet"),
    ]
    for data, message in cases:
        with pytest.raises(MesetaError, match=message):
            rows.file_paths(data, tmp_path)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="the database is gone"):
        rows.file_paths(failing_stream(table), tmp_path)
    assert list(tmp_path.iterdir()) == []
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(rows.shutil, "disk_usage", lambda _: usage(2**40, 2**40, rows.MIN_FREE_BYTES))
    with pytest.raises(MesetaError, match=r"1\.1 GB are free .* after 0 rows"):
        rows.file_paths(table, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_predictions_have_the_form_of_the_rows() -> None:
    table, predictions = make_table(), pa.table({"prediction": np.linspace(0, 1, 20, dtype=np.float32)})
    for kind in ("pyarrow table", "stream", "DuckDB"):
        assert rows.like_rows(predictions, KINDS[kind](table)) is predictions
    columns = rows.like_rows(predictions, KINDS["dict"](table))
    np.testing.assert_array_equal(columns["prediction"], predictions["prediction"].to_numpy())
    frame = pandas_frame(table)
    got = rows.like_rows(predictions, frame)
    assert type(got) is type(frame) and got.index.equals(frame.index) and got["prediction"].dtype == np.float32
    polars = polars_frame(table)
    assert type(rows.like_rows(predictions, polars)) is type(polars)
