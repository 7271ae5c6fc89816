"""Rows in memory are predicted as a file with the same columns, whatever the columns and the kind of rows are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meseta
from api.test_rows import KINDS
from meseta.errors import ERROR_PREFIX, MesetaError

pytestmark = pytest.mark.soak


def cast(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, table[name].cast(kind))


CHANGES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "none": lambda table: table,
    "without label": lambda table: table.drop_columns("label"),
    "extra": lambda table: table.append_column("other", pa.array(["x"] * table.num_rows)),
    "reordered": lambda table: table.select(table.column_names[::-1]),
    "missing city": lambda table: table.drop_columns("city"),
    "missing price": lambda table: table.drop_columns("price"),
    "missing tags": lambda table: table.drop_columns("tags"),
    "missing tags.weight": lambda table: table.drop_columns("tags.weight"),
    "empty city": lambda table: table.set_column(
        table.column_names.index("city"), "city", pa.array([None] * table.num_rows, pa.string())
    ),
    "age of 32 bits": lambda table: cast(table, "age", pa.int32()),
    "age as a float": lambda table: cast(table, "age", pa.float64()),
    "age as text": lambda table: cast(table, "age", pa.string()),
    "price as words": lambda table: table.set_column(1, "price", pa.array(["cheap"] * table.num_rows)),
    "city as categories": lambda table: cast(table, "city", pa.dictionary(pa.int32(), pa.string())),
    "city as large text": lambda table: cast(table, "city", pa.large_string()),
    "city as numbers": lambda table: table.set_column(
        table.column_names.index("city"), "city", pa.array(np.arange(table.num_rows))
    ),
    "tags of 32 bits": lambda table: cast(table, "tags", pa.large_list(pa.int32())),
    "tags as text": lambda table: table.set_column(
        table.column_names.index("tags"), "tags", pa.array(["1,2"] * table.num_rows)
    ),
}
"""Tables whose columns differ from those of the training data."""
REFUSED = {
    "missing city": "'city'",
    "missing price": "'price'",
    "missing tags": "'tags'",
    "missing tags.weight": "'tags.weight'",
    "age as text": "'age'",
    "price as words": "'price'",
    "tags as text": "'tags'",
}
"""Changes that are refused, and a name in the error."""


def predict_file(run: meseta.Run, table: pa.Table, folder: Path) -> np.ndarray | str:
    """Return the predictions of `meseta predict --data` for a Parquet file, or its error with `data` for the file."""
    path, out = folder / "rows.parquet", folder / "out.parquet"
    pq.write_table(table, path)
    command = [
        sys.executable,
        "-m",
        "meseta.cli.main",
        "predict",
        str(run.path),
        "--out",
        str(out),
        "--data",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return pq.read_table(out)["prediction"].to_numpy()
    assert done.stderr.startswith(ERROR_PREFIX)
    error = done.stderr.removeprefix(ERROR_PREFIX).strip()
    return error.replace(f"source {str(path)!r}", "data").replace(repr(str(path)), "data")


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_every_kind_are_predicted_as_a_file(
    change: str, table: pa.Table, trained: meseta.Run, tmp_path: Path
) -> None:
    changed = CHANGES[change](table.slice(0, 300))
    expected = predict_file(trained, changed, tmp_path)
    if change in REFUSED:
        assert isinstance(expected, str) and REFUSED[change] in expected
    for kind, convert in KINDS.items():
        rows: Any = convert(changed)
        if isinstance(expected, str):
            with pytest.raises(MesetaError) as raised:
                trained.predict(rows)
            # Frames of pandas and polars have large text.
            assert str(raised.value).replace("large_string", "string") == expected, kind
            continue
        assert change not in REFUSED
        predictions = trained.predict(rows)
        np.testing.assert_array_equal(predictions["prediction"], expected, kind)
        keeps_kind = kind.partition(" ")[0] in {"dict", "pandas", "polars"}
        assert type(predictions) is (type(rows) if keeps_kind else pa.Table), kind
        if kind == "pandas":
            assert predictions.index.equals(rows.index) and predictions.index[0] == 299


def test_indexes_of_pandas_are_kept(table: pa.Table, trained: meseta.Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = table.slice(0, 6).to_pandas()
    indexes = [
        pandas.Index([5, 5, 1, 0, -1, 7], name="row"),
        pandas.date_range("2026-01-31", periods=6, freq="h", tz="UTC"),
        pandas.MultiIndex.from_product([["a", "b"], [1, 2, 3]], names=["letter", "number"]),
    ]
    for index in indexes:
        predictions = trained.predict(frame.set_axis(index))
        pandas.testing.assert_index_equal(predictions.index, index)
        np.testing.assert_array_equal(predictions["prediction"], trained.predict(table.slice(0, 6))["prediction"])
