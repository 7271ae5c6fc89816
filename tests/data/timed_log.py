"""A small log with times, users and ages, for the tests of splits."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from data.click_log import read_split
from meseta.data import Dataset
from meseta.data.prepare import PrepareOptions, prepare

NUM_ROWS = 400
SCHEMA = "label: click\ntime: ts\ngroup: user\ndense: [row]\nbuckets: {age: 7}\n"


def make_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Times not in order and often equal, ages sometimes missing."""
    draw = np.random.default_rng(seed)
    return [
        {
            "click": int(draw.integers(2)),
            "ts": int(1.7e9 + draw.integers(50)),
            "user": f"user {draw.integers(40)}",
            "row": row,
            "age": "" if draw.random() < 0.1 else round(float(draw.lognormal(3, 0.5)), int(draw.integers(3))),
        }
        for row in range(NUM_ROWS)
    ]


def write(tmp_path: Path, rows: list[dict[str, Any]], num_files: int = 1) -> None:
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), num_files)):
        with (tmp_path / f"log-{number}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows[place] for place in part)


def run(tmp_path: Path, out: str = "out", **options: Any) -> Dataset:
    settings = {"out": tmp_path / out, "schema": tmp_path / "schema.yaml", "hash_rows": 100, **options}
    return prepare(PrepareOptions(sources=[f"{tmp_path}/log-*.csv"], **settings))


def rows_in(dataset: Dataset, split: str) -> list[int]:
    """Numbers of the rows, from their standardised logarithms."""
    if not dataset.splits[split].num_rows:
        return []
    [row] = dataset.dense
    values = read_split(dataset.dir, split).column("row").to_numpy().astype(np.float64)
    return np.expm1(values * row.std + row.mean).round().astype(int).tolist()
