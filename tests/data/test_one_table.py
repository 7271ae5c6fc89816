"""One table as CSV, with a decimal comma, as JSON lines, as Parquet of several types and in folders gives one prepared
dataset."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data import Dataset, PrepareOptions
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference
from meseta.data.prepare import prepare
from sampling import fewer_examples

Table = list[dict[str, Any]]

ROWS = st.fixed_dictionaries(
    {
        "click": st.integers(0, 1),
        "price": st.none() | st.decimals(-9999, 9999, places=2),
        "user": st.none() | st.integers(-(2**53), 2**53),
        "shop": st.integers(0, 40),
        "city": st.sampled_from(["", "Ávila", "a;b", "12a", "x,y"]),
        "tags": st.lists(st.integers(-9, 2**40), max_size=3),
    }
)
SCHEMA: dict[str, Any] = {
    "label": "click", "group": "user", "dense": ["price"], "signed": ["price"],
    "categorical": ["user", "shop", "city", "tags"], "whole_numbers": ["user", "shop", "tags"],
    "buckets": {"price": [-50, 0, 12.5]}, "crosses": {"user_x_shop": ["user", "shop"]},
}  # fmt: skip
WHOLE = ("user", "shop", "tags")


def each(values: Any, convert: Callable[[int], Any]) -> Any:
    """A value, or those of a list, converted; None stays."""
    if isinstance(values, list):
        return list(map(convert, values))
    return None if values is None else convert(values)


def write_csv(path: Path, table: Table, spell: Callable[[int], str], decimal: str = ".") -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";" if decimal == "," else ",")
        writer.writerow(table[0])
        for row in table:
            texts = {name: each(row[name], spell) or "" for name in WHOLE if name in row}
            texts["tags"] = "|".join(texts["tags"])
            price = "" if row["price"] is None else str(row["price"]).replace(".", decimal)
            writer.writerow(({**row, **texts, "price": price}).values())


def write_json(path: Path, table: Table, convert: Callable[[int], Any]) -> None:
    def document(row: dict[str, Any]) -> dict[str, Any]:
        price = None if row["price"] is None else float(row["price"])
        return {**row, "price": price, **{name: each(row[name], convert) for name in WHOLE if name in row}}

    path.write_text("".join(json.dumps(document(row)) + "\n" for row in table))


def write_parquet(
    path: Path, table: Table, kinds: dict[str, tuple[pa.DataType, Callable[[int], Any]]], price: pa.DataType
) -> None:
    columns: dict[str, pa.Array] = {name: pa.array([row[name] for row in table]) for name in ("click", "city")}
    columns["price"] = pa.array([row["price"] for row in table], pa.decimal128(9, 2)).cast(price)
    for name, (kind, convert) in kinds.items():
        if name not in table[0]:
            continue
        values = [each(row[name], convert) for row in table]
        columns[name] = pa.array(values, pa.list_(kind) if name == "tags" else kind)
    pq.write_table(pa.table(columns), path)


def write_folders(path: Path, table: Table, write: Callable[[Path, Table], None], suffix: str) -> None:
    """Folders `shop=7`, in the order of their paths; their files lack that column."""
    for shop, rows in itertools.groupby(table, key=lambda row: row["shop"]):
        folder = path / f"shop={shop}"
        folder.mkdir(parents=True)
        write(folder / f"rows{suffix}", [{name: row[name] for name in row if name != "shop"} for row in rows])


INTEGER, DOUBLE = (pa.int64(), int), (pa.float64(), float)
STRING, DECIMAL = (pa.string(), lambda n: f"{n}.0"), (pa.decimal128(20, 1), Decimal)
BINARY = (pa.binary(), lambda n: b"%d" % n)
FORMS: dict[str, Callable[[Path, Table], None]] = {
    "a.csv": lambda path, table: write_csv(path, table, str),
    "b.csv": lambda path, table: write_csv(path, table, lambda n: f" {n}.00"),
    "german.csv": lambda path, table: write_csv(path, table, lambda n: f"{n},0", decimal=","),
    "a.jsonl": lambda path, table: write_json(path, table, int),
    "b.jsonl": lambda path, table: write_json(path, table, float),
    "c.jsonl": lambda path, table: write_json(path, table, lambda n: f"{n}e0"),
    "a.parquet": lambda path, table: write_parquet(path, table, dict.fromkeys(WHOLE, INTEGER), pa.float64()),
    "b.parquet": lambda path, table: write_parquet(path, table, dict.fromkeys(WHOLE, DOUBLE), pa.decimal128(9, 2)),
    "c.parquet": lambda path, table: write_parquet(path, table, dict.fromkeys(WHOLE, STRING), pa.float64()),
    "d.parquet": lambda path, table: write_parquet(
        path, table, {"user": DECIMAL, "shop": BINARY, "tags": DOUBLE}, pa.decimal256(40, 2)
    ),
    "e.parquet": lambda path, table: write_parquet(
        path, table, {"user": DOUBLE, "shop": (pa.uint8(), int), "tags": DECIMAL}, pa.float64()
    ),
    "folders.csv": lambda path, table: write_folders(path, table, FORMS["b.csv"], ".csv"),
    "folders.jsonl": lambda path, table: write_folders(path, table, FORMS["b.jsonl"], ".jsonl"),
    "folders.parquet": lambda path, table: write_folders(path, table, FORMS["b.parquet"], ".parquet"),
}  # fmt: skip


def prepared(folder: Path, name: str, table: Table, *, vocabulary: bool) -> Dataset:
    path = folder / name
    FORMS[name](path, table)
    text_keys = {"multi_valued": {"tags": "|"}} if name.endswith(".csv") else {}
    format_keys = {"decimal": ",", "delimiter": ";"} if name == "german.csv" else {}
    schema = folder / f"{name}.yaml"
    schema.write_text(json.dumps({**SCHEMA, **text_keys, **format_keys}))
    options: dict[str, Any] = {"vocabulary": True, "min_count": 1} if vocabulary else {"hash_rows": 10**6}
    return prepare(
        PrepareOptions(sources=[str(path)], out=folder / f"{name}.out", schema=schema, test_fraction=0.2, **options)
    )


@given(st.lists(ROWS, min_size=20, max_size=40), st.booleans())
@fewer_examples(20)
def test_one_table_gives_one_dataset(tmp_path_factory: pytest.TempPathFactory, table: Table, vocabulary: bool) -> None:
    folder = tmp_path_factory.mktemp("forms")
    table = sorted(table, key=lambda row: str(row["shop"]))  # the order of folders
    datasets = {name: prepared(folder, name, table, vocabulary=vocabulary) for name in FORMS}
    first = next(iter(datasets))
    for name, dataset in datasets.items():
        assert (
            encoding_difference(DatasetEncoding.from_dataset(datasets[first]), DatasetEncoding.from_dataset(dataset))
            is None
        )
        for split in ("train", "test"):
            expected, other_table = (pq.read_table(folder / f"{form}.out" / split) for form in (first, name))
            assert other_table.equals(expected), name
