"""Small click logs for the tests of this folder, and a plain Python reading of them."""

from __future__ import annotations

import gzip
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh64_intdigest as xxh64

from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare

DENSE = [f"int_{i}" for i in range(13)]
SPARSE = [f"cat_{i}" for i in range(26)]


def make_lines(num_rows: int, seed: int = 0, num_values: int = 40) -> list[str]:
    """Return lines in Criteo's layout, with missing values, negative integers and skewed categories."""
    draw = random.Random(seed)
    lines = []
    for _ in range(num_rows):
        dense = ["" if draw.random() < 0.2 else str(int(draw.lognormvariate(2, 2)) - 2) for _ in DENSE]
        sparse = ["" if draw.random() < 0.1 else f"{int(num_values ** draw.random()):08x}" for _ in SPARSE]
        lines.append("\t".join([str(int(draw.random() < 0.25)), *dense, *sparse]))
    return lines


def write_tsv(path: Path, lines: list[str], end: str = "\n") -> Path:
    text = end.join(lines) + end
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


@dataclass
class Oracle:
    """Expected result of `prepare`, computed in plain Python from training and test lines."""

    label: list[float]
    dense: list[list[float]]
    sparse: list[list[int]]

    @staticmethod
    def of(lines: list[str], training: list[str], num_rows: int, seed: int) -> Oracle:
        def values(text: str) -> list[float]:
            return [np.float32(math.log1p(max(int(x or 0), 0))).item() for x in text.split("\t")[1:14]]

        columns = list(zip(*map(values, training), strict=True))
        means = [math.fsum(column) / len(column) for column in columns]
        stds = [statistics.pstdev(column) or 1.0 for column in columns]
        seeds = [xxh64(name.encode(), seed) for name in SPARSE]
        return Oracle(
            label=[float(line.split("\t")[0]) for line in lines],
            dense=[[(x - m) / s for x, m, s in zip(values(line), means, stds, strict=True)] for line in lines],
            sparse=[
                [xxh64(x.encode(), s) * num_rows >> 64 for x, s in zip(line.split("\t")[14:], seeds, strict=True)]
                for line in lines
            ],
        )


def reuse_shares(ids: list[list[int]], window: int = 65_536) -> tuple[list[float], list[float]]:
    """Return the shares of rows and of lookups per bin for one list of ids per sample."""
    edges = [0, *(2**i for i in range(16)), math.inf]
    rows, lookups = [0] * 17, [0] * 17
    for start in range(0, len(ids), window):
        for count in Counter(i for sample in ids[start : start + window] for i in sample).values():
            place = next(k for k in range(17) if edges[k] < count <= edges[k + 1])
            rows[place] += 1
            lookups[place] += count
    return [r / sum(rows) for r in rows], [n / sum(lookups) for n in lookups]


def read_split(folder: Path, split: str) -> pa.Table:
    """Read all parts of a split in order."""
    return pa.concat_tables([pq.read_table(path) for path in sorted((folder / split).glob("*.parquet"))])


def prepare_with(tmp_path: Path, name: str, schema: str | None, **options: Any) -> Dataset:
    """Prepare `tmp_path`/`name` with the text of a schema file, in `tmp_path`/out."""
    settings = {"test_fraction": 0.0, "hash_rows": 500, "out": tmp_path / "out", **options}
    if schema is not None:
        (tmp_path / "schema.yaml").write_text(schema)
        settings["schema"] = tmp_path / "schema.yaml"
    return prepare(PrepareOptions(sources=[str(tmp_path / name)], **settings))


def hashed(feature: str, value: str) -> int:
    """Return the row of a value in one of the 500-row tables of `prepare_with`."""
    return xxh64(value.encode(), xxh64(feature.encode(), 0)) * 500 >> 64
