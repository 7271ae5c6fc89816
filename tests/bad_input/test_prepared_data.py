"""Tests of Parquet files that contradict dataset.json: `meseta train` names file, row, column and rule."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here
from meseta.data import Reader, ReaderOptions
from small_run import settings, write_config

PART = "train/part-00000.parquet"


def rewrite(data: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(data / PART)
    pq.write_table(change(table), data / PART, row_group_size=300)


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, pa.array(values, table.schema.field(column).type))

    return change


def with_type(column: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index(column), column, pa.nulls(len(table), kind))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_value("label", 701, 2.0), "row 701: 'label' must be in 0..1, got 2;"),
        (with_value("label", 0, -0.5), "row 0: 'label' must be in 0..1, got -0.5;"),
        (with_value("label", 3, float("nan")), "row 3: 'label' must be in 0..1, got nan;"),
        (with_value("label", 3, None), "row 3: column 'label' has a missing value;"),
        (with_value("price", 650, None), "row 650: column 'price' has a missing value;"),
        (with_value("user", 650, None), "row 650: column 'user' has a missing value;"),
        (with_value("tags", 650, None), "row 650: column 'tags' has a missing value;"),
        (with_value("tags", 650, [1, None]), "row 650: a list of column 'tags' has a missing value;"),
        (with_value("tags.weight", 650, [1.0] * 9), r"row 650: feature 'tags' has \d ids but 9 weights;"),
        (lambda t: t.drop_columns(["price"]), "has no column 'price';"),
        (with_type("price", pa.string()), "column 'price' must hold numbers, got string;"),
        (with_type("user", pa.float32()), "column 'user' must hold whole numbers, got float;"),
        (with_type("tags", pa.int64()), "column 'tags' must hold lists of whole numbers, got int64;"),
        (with_type("label", pa.string()), "column 'label' must hold numbers, got string;"),
        (lambda t: t.slice(1), r"holds \d+ rows, but dataset.json says \d+;"),
    ],
)
def test_the_place_is_named(tiny: Path, tmp_path: Path, change: Any, message: str) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    rewrite(data, change)
    ended = run_here(
        "train", write_config(tmp_path / "c.yaml", settings(data, tmp_path / "run", data__shuffle_window_rows=5000))
    )
    assert ended.code == 1 and ended.out == ""
    [line] = ended.err.splitlines()
    where = "error: (step 1: )?" + re.escape(f"dataset file {str(data / PART)!r}")
    assert re.match(f"{where}[,:]? {message} .*prepare the dataset again", line), line


def test_a_weight_that_is_no_number(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    row = next(i for i, tags in enumerate(pq.read_table(data / PART)["tags"].to_pylist()) if i > 350 and len(tags) == 2)
    rewrite(data, with_value("tags.weight", row, [1.0, float("nan")]))
    ended = run_here("train", write_config(tmp_path / "c.yaml", settings(data, tmp_path / "run")))
    assert f"row {row}: weights of feature 'tags' must be finite, got nan;" in ended.err and ended.code == 1


def test_wider_ids_in_one_of_two_files_are_read(tiny: Path, tmp_path: Path) -> None:
    """Files may be written by several programs, with ids of int32 and int64 and labels of float64."""
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    table = pq.read_table(data / PART)
    wide = table.cast(pa.schema([f.with_type(pa.int64()) if f.name == "user" else f for f in table.schema])).set_column(
        table.schema.get_field_index("label"), "label", table["label"].cast(pa.float64())
    )
    pq.write_table(table.slice(0, 500), data / PART)
    pq.write_table(wide.slice(500), data / "train/part-00001.parquet")
    document = json.loads((data / "dataset.json").read_text())
    files = [{"path": PART, "num_rows": 500}, {"path": "train/part-00001.parquet", "num_rows": len(table) - 500}]
    document["splits"]["train"]["files"] = files
    (data / "dataset.json").write_text(json.dumps(document))
    options = ReaderOptions(batch_size=len(table))
    [wider], [expected] = (list(Reader(path, "train", options).epoch()) for path in (data, tiny))
    assert wider.label.dtype == expected.label.dtype and wider.label.equal(expected.label)
    assert wider.sparse.values.equal(expected.sparse.values) and wider.dense.equal(expected.dense)
