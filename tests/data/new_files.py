"""Raw files of every kind, in two parts: rows to train on, and the test split's, with labels and without."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.click_log import make_lines

Table = dict[str, list[Any]]
NUM_ROWS, NUM_TRAIN = 500, 350
SCHEMA = {
    "label": "click",
    "weight": "importance",
    "group": "shop",
    "time": "when",
    "dense": ["price", "balance", "hour"],
    "signed": ["balance"],
    "categorical": ["shop", "city", "hour", "tags"],
    "buckets": {"age": 4},
    "crosses": {"city_x_age": ["city", "age"]},
}


def columns(seed: int = 0) -> Table:
    """Every role that a column can have."""
    draw = random.Random(seed)
    rows = range(NUM_ROWS)
    return {
        "click": [draw.randrange(2) for _ in rows],
        "importance": [draw.choice([0.5, 1.0, 2.0]) for _ in rows],
        "when": [1_700_000_000 + 60 * row for row in rows],
        "price": [draw.choice(["", "9.5", "12", "inf"]) for _ in rows],
        "balance": [f"{draw.gauss(0, 50):.3f}" for _ in rows],
        "hour": [draw.randrange(24) for _ in rows],
        "age": [draw.choice(["", *range(18, 70)]) for _ in rows],
        "shop": [f"s{int(40 * draw.random() ** 2) + (row > NUM_TRAIN) * draw.randrange(3) * 100}" for row in rows],
        "city": [draw.choice(["Ávila", "León, old", 'the "third"', ""]) for _ in rows],
        "tags": ["|".join(f"t{draw.randrange(30)}:{draw.randrange(1, 9) / 4}" for _ in range(draw.randrange(4)))
                 for _ in rows],
    }  # fmt: skip


def without(table: Table, *names: str) -> Table:
    return {name: values for name, values in table.items() if name not in names}


def part(table: Table, first: int, stop: int) -> Table:
    return {name: values[first:stop] for name, values in table.items()}


def write_csv(path: Path, table: Table, *, header: bool = True) -> Path:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    if header:
        writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    text = file.getvalue().encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)  # the same bytes at any time
    return path


def write_parquet(path: Path, table: Table) -> Path:
    """Return numbers as numbers, and tags as lists with a column of weights."""
    made: dict[str, Any] = dict(table)
    for name in {"price", "age", "balance"} & set(table):
        made[name] = [float(value) if value != "" else None for value in table[name]]
    if "tags" in table:
        pairs = [[pair.split(":") for pair in text.split("|") if pair] for text in table["tags"]]
        made["tags"] = pa.array([[tag for tag, _ in row] for row in pairs], pa.list_(pa.string()))
        made["tag_weights"] = pa.array([[float(w) for _, w in row] for row in pairs], pa.list_(pa.float64()))
    pq.write_table(pa.table(made), path, row_group_size=61)
    return path


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def svm_lines(*, fields: bool, qid: bool = False) -> list[str]:
    draw, lines = random.Random(1), []
    for row in range(NUM_ROWS):
        field = lambda f: f"{f}:" if fields else ""  # noqa: E731
        pairs = [f"{field(f)}{draw.randrange(90 if row < NUM_TRAIN else 120)}:{draw.choice(['1', '0.5'])}"
                 for f in (0, 0, 3)]  # fmt: skip
        lines.append(" ".join([str(row % 2), *([f"qid:{row // 5}"] if qid else []), *pairs]))
    return lines


def unlabelled(lines: Sequence[str], sign: str) -> list[str]:
    return [line.partition(sign)[2] for line in lines]


Files = tuple[list[Path], Path, Path, dict[str, Any]]
"""Files to train on, that of the test split, the same rows without labels, and options of `prepare`."""


def of_csv(folder: Path) -> Files:
    table, schema = columns(), {**SCHEMA, "multi_valued": {"tags": "|"}, "weights": {"tags": ":"}}
    (folder / "schema.yaml").write_text(json.dumps(schema))
    train = write_csv(folder / "train.csv", part(table, 0, NUM_TRAIN))
    rest = part(table, NUM_TRAIN, NUM_ROWS)
    new = dict(reversed(list(without(rest, "click", "importance").items())))
    new = {"note": ["x,\ny"] * len(rest["click"]), **new}
    return [train], write_csv(folder / "test.csv", rest), write_csv(folder / "new.csv.gz", new), {
        "schema": folder / "schema.yaml"
    }  # fmt: skip


def of_headerless(folder: Path) -> Files:
    table = without(columns(), "importance", "tags", "age")
    paths = [folder / "train.csv", folder / "test.csv", folder / "new.csv"]
    rest = part(table, NUM_TRAIN, NUM_ROWS)
    for path, rows in zip(paths, (part(table, 0, NUM_TRAIN), rest, without(rest, "click")), strict=True):
        write_csv(path, rows, header=False)
    return [paths[0]], paths[1], paths[2], {"label": "column_1"}


def of_parquet(folder: Path) -> Files:
    table = columns()
    (folder / "schema.yaml").write_text(json.dumps({**SCHEMA, "weights": {"tags": "tag_weights"}}))
    rest = part(table, NUM_TRAIN, NUM_ROWS)
    train = [
        write_parquet(folder / f"{n}.parquet", part(table, 100 * n, min(100 * n + 100, NUM_TRAIN))) for n in range(4)
    ]
    return train, write_parquet(folder / "test.parquet", rest), write_parquet(
        folder / "new.parquet", without(rest, "click", "importance")
    ), {"schema": folder / "schema.yaml"}  # fmt: skip


def of_lines(lines: list[str], suffix: str, sign: str) -> Callable[[Path], Files]:
    def write(folder: Path) -> Files:
        train = write_lines(folder / f"train{suffix}", lines[:NUM_TRAIN])
        test = write_lines(folder / f"test{suffix}", lines[NUM_TRAIN:])
        return [train], test, write_lines(folder / f"new{suffix}", unlabelled(lines[NUM_TRAIN:], sign)), {}

    return write


KINDS: dict[str, Callable[[Path], Files]] = {
    "csv": of_csv,
    "headerless": of_headerless,
    "parquet": of_parquet,
    "criteo": of_lines(make_lines(NUM_ROWS), ".tsv", "\t"),
    "libsvm": of_lines(svm_lines(fields=False), ".svm", " "),
    "qid": of_lines(svm_lines(fields=False, qid=True), ".txt", " "),
    "libffm": of_lines(svm_lines(fields=True), ".ffm", " "),
}
