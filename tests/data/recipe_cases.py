"""Small raw files of every format, their options of `prepare`, and comparisons of a recipe with a prepared dataset."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import make_lines, write_tsv
from data.service.tier import digest
from meseta.data import Dataset, PrepareOptions, Reader, ReaderOptions
from meseta.data.formats import parquet
from meseta.data.formats import text as text_format
from meseta.data.prepare import prepare, recipe_preparation, write

NUM_ROWS = 330
"""Number of rows of each format, in three files."""
CSV_SCHEMA = """
label: click
weight: importance
group: user
time: ts
dense: [age]
signed: [age]
categorical: [city, genres, tags, user]
multi_valued: {genres: "|", tags: " "}
weights: {tags: ":"}
buckets: {age: 5}
crosses: {city_x_age: [city, age], city_x_user: [city, user]}
"""


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Use small row groups, windows, parts and blocks."""
    patch.setattr(text_format, "BLOCK_BYTES", 3000)
    patch.setattr(parquet, "BLOCK_ROWS", 40)
    patch.setattr(write, "WINDOW_SAMPLES", 64)
    patch.setattr(recipe_preparation, "WINDOW_SAMPLES", 64)
    patch.setattr(write, "NUM_PART_WINDOWS", 1)
    patch.setattr(write, "ROW_GROUP_ROWS", 32)
    patch.setattr(recipe_preparation, "ROW_GROUP_ROWS", 32)


def write_tsv_log(folder: Path) -> dict[str, Any]:
    lines = make_lines(NUM_ROWS)
    for number in range(3):
        write_tsv(folder / f"{number}.tsv", lines[number::3], "\r\n" if number == 1 else "\n")
    return {"sources": [f"{folder}/*.tsv"], "hash_rows": 500}


def write_csv_log(folder: Path) -> dict[str, Any]:
    """Write quoted fields, line ends inside fields and a reordered file. The first file has no final line end."""
    draw = random.Random(1)
    header = ["click", "importance", "user", "ts", "age", "city", "genres", "tags", "unused"]
    for number in range(3):
        names = header if number != 1 else [*reversed(header)]
        with (folder / f"{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\r\n" if number == 2 else "\n")
            writer.writerow(names)
            for row in range(NUM_ROWS // 3):
                values = {
                    "click": draw.choice(["0", "1", "true", "0.5"]) if row % 10 == 9 else str(draw.randrange(2)),
                    "importance": f"{draw.random() + 0.5:.3f}",
                    "user": f"u{draw.randrange(30)}",
                    "ts": 1_700_000_000 + 100 * number + draw.randrange(150),
                    "age": draw.choice(["", "NA", "17", "25.5", "1e3", "-3", str(draw.random())]),
                    "city": draw.choice(["Paris", 'Köln "alt"', "a,b", "two\nlines", ""]),
                    "genres": "|".join(draw.choices(["drama", "comedy", "sci fi"], k=draw.randrange(4))),
                    "tags": " ".join(draw.choices(["a:0.5", "b:-2", "c:d:1e-3"], k=draw.randrange(3))),
                    "unused": row,
                }
                writer.writerow([values[name] for name in names])
        content = (folder / f"{number}.csv").read_bytes()
        (folder / f"{number}.csv").write_bytes(content.rstrip(b"\r\n") if number == 0 else content + b"\n\r\n")
    (folder / "schema.yaml").write_text(CSV_SCHEMA)
    return {"sources": [f"{folder}/*.csv"], "schema": folder / "schema.yaml", "hash_rows": 300}


def write_bad_csv_log(folder: Path) -> dict[str, Any]:
    """Write files without a header, with bad rows and unclosed quotes."""
    draw = random.Random(2)
    for number in range(3):
        rows = [
            draw.choice([f'{row % 2},cheap,"x"', f'{row % 2},5,a"b', "1,2", f'2,{row},"c"'])
            if draw.random() < 0.05
            else f'{row % 2},{row}.5,"town {draw.randrange(9)}{chr(10) * (row % 4 == 0)}"'
            for row in range(NUM_ROWS // 3)
        ]
        (folder / f"{number}.csv").write_text("\n".join(rows) + "\n")
    return {
        "sources": [f"{folder}/*.csv"], "label": "column_1", "dense": ["column_2"], "sparse": ["column_3"],
        "bad_rows": "skip", "max_bad_rows": 0.5, "hash_rows": 100,
    }  # fmt: skip


def write_svm_log(folder: Path) -> dict[str, Any]:
    draw = random.Random(3)
    for number in range(3):
        rows = [
            f"{2 * draw.randrange(2) - 1:+d} qid:{row // 4} " + " ".join(f"{draw.randrange(40)}:{draw.choice([1, 0.5])}"
            for _ in range(draw.randrange(4))) + (" # note" if row % 7 == 0 else "")
            for row in range(NUM_ROWS // 3)
        ]  # fmt: skip
        (folder / f"{number}.svm").write_text("\n".join(rows) + "\n")
    return {"sources": [f"{folder}/*.svm"], "hash_rows": 200}


def write_ffm_log(folder: Path) -> dict[str, Any]:
    draw = random.Random(4)
    for number in range(3):
        rows = [
            f"{draw.randrange(2)} 0:{draw.randrange(20)}:1 1:{draw.randrange(7)}:0.5"
            + f" 1:{draw.randrange(7)}:2" * draw.randrange(2)
            for _ in range(NUM_ROWS // 3)
        ]
        (folder / f"{number}.ffm").write_text("\n".join(rows) + "\n")
    return {"sources": [f"{folder}/*.ffm"], "hash_rows": 200}


def write_parquet_log(folder: Path) -> dict[str, Any]:
    """Write lists, weighted lists, integers with nulls, several labels and times, in small row groups."""
    draw = random.Random(5)
    for number in range(3):
        size = NUM_ROWS // 3
        bags = [[f"b{draw.randrange(12)}" for _ in range(draw.randrange(4))] for _ in range(size)]
        table = pa.table(
            {
                "click": [draw.randrange(2) for _ in range(size)],
                "buy": [draw.random() for _ in range(size)],
                "price": [draw.choice([None, 1.5, float("inf"), -2.0, draw.random()]) for _ in range(size)],
                "shop": pa.array([draw.choice([None, 1, 2**40, -7]) for _ in range(size)], pa.int64()),
                "bag": bags,
                "bag_weight": [[draw.random() for _ in bag] for bag in bags],
                "user": [f"u{draw.randrange(25)}" for _ in range(size)],
                "ts": pa.array([1_700_000_000 + 90 * number + draw.randrange(120) for _ in range(size)]),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=[25, 70, 1000][number])
    (folder / "schema.yaml").write_text(
        "labels: [click, buy]\ngroup: user\ntime: ts\ndense: [price]\ncategorical: [shop, bag, user]\n"
        "weights: {bag: bag_weight}\nbuckets: {price: [0.5, 1]}\ncrosses: {both: [shop, user]}\n"
    )
    return {"sources": [f"{folder}/*.parquet"], "schema": folder / "schema.yaml", "hash_rows": 300}


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tsv": write_tsv_log,
    "csv": write_csv_log,
    "bad csv": write_bad_csv_log,
    "svm": write_svm_log,
    "ffm": write_ffm_log,
    "parquet": write_parquet_log,
}
FRACTIONS = {"valid_fraction": 0.2, "test_fraction": 0.2}
SPLITS: dict[str, dict[str, Any]] = {
    "drawn": FRACTIONS,
    "groups": {**FRACTIONS, "split_by": "group"},
    "time": {**FRACTIONS, "split_by": "time"},
    "files": {"test_files": ["2"], "valid_fraction": 0.2},
    "files alone": {"test_files": ["2"], "valid_files": ["1"]},
}
CASES = [
    pytest.param("tsv", "drawn", {}, marks=pytest.mark.soak),
    ("tsv", "files", {"vocabulary": True, "min_count": 3}),
    pytest.param("csv", "drawn", {}, marks=pytest.mark.soak),
    ("csv", "groups", {}),
    pytest.param("csv", "time", {"vocabulary": True, "min_count": 2}, marks=pytest.mark.soak),
    pytest.param("bad csv", "drawn", {}, marks=pytest.mark.soak),
    ("bad csv", "files alone", {"vocabulary": True, "min_count": 1}),
    pytest.param("svm", "groups", {}, marks=pytest.mark.soak),
    ("svm", "drawn", {"vocabulary": True, "min_count": 2}),
    ("ffm", "files", {}),
    ("parquet", "time", {"hash_rows_by_feature": {"user": 2**31 + 5}}),
    pytest.param("parquet", "drawn", {"vocabulary": True, "min_count": 2}, marks=pytest.mark.soak),
    pytest.param("parquet", "files alone", {}, marks=pytest.mark.soak),
]
"""Format of the files, split, and further options."""


def raw_options(folder: Path, kind: str, split: str, more: dict[str, Any]) -> dict[str, Any]:
    """Write files into `folder`/raw; returns options to prepare them with."""
    (folder / "raw").mkdir()
    options = KINDS[kind](folder / "raw") | SPLITS[split] | more
    ending = Path(options["sources"][0]).suffix
    for name in ("test_files", "valid_files"):
        if name in options:
            options[name] = [f"{folder}/raw/{number}{ending}" for number in options[name]]
    return options


def both(folder: Path, **options: Any) -> tuple[Dataset, Dataset]:
    """Return a prepared dataset and a recipe of the same files."""
    whole = prepare(PrepareOptions(out=folder / "whole", **options))
    return whole, prepare(PrepareOptions(out=folder / "recipe", recipe_only=True, **options))


def described(dataset: Dataset) -> dict[str, Any]:
    """Return the content of dataset.json without files and recipe."""
    document = dataset.to_dict()
    document.pop("recipe", None)
    for split in document["splits"].values():
        del split["files"]
    return document


def batches(dataset: Dataset, split: str, **options: Any) -> list[Any]:
    """Return the sizes and state of a reader and the digests of all batches of two epochs."""
    reader = Reader(dataset, split, ReaderOptions(**{"batch_size": 23, "window_rows": 100, **options}))
    digests = [digest(batch) for batch in reader.epochs(2)]
    return [reader.num_rows, reader.excluded_rows, reader.get_state(), *digests]
