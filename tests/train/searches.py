"""Logs with useful and useless columns, and configs of searches."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meseta.config import RunConfig, validate_document
from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare
from meseta.train.interop.default_settings import choose_settings, find_free_keys
from meseta.train.search.candidates import SEARCHED_KEYS

NOISE = ("noise_id", "noise_number", "noise_tags")
SHORT = {"train": {"epochs": 2, "batch_size": 256, "search_budget": 2.5}}
"""Settings with which a search takes a second."""


def write_log(folder: Path, *, seed: int = 0, rows: int = 3000, valid: float = 0.2) -> Dataset:
    """Prepare a log with useful and useless columns of all kinds."""
    draw = np.random.default_rng(seed)
    item, price, weak = draw.integers(0, 30, rows), draw.normal(0, 1, rows), draw.integers(0, 4, rows)
    logits = -0.5 + draw.normal(0, 1, 30)[item] - 0.5 * price + np.array([-0.45, -0.15, 0.15, 0.45])[weak]
    tags = draw.integers(0, 40, (rows, 2))
    columns = {
        "label": (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64),
        "item": [f"i{number}" for number in item],
        "weak": [f"w{number}" for number in weak],
        "noise_id": [f"n{number}" for number in draw.integers(0, 800, rows)],
        "noise_tags": pa.array(tags.tolist(), pa.list_(pa.int64())),
        "price": price,
        "noise_number": draw.normal(0, 1, rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "log.parquet")
    sources, sparse = [str(folder / "log.parquet")], ["item", "weak", "noise_id", "noise_tags"]
    return prepare(PrepareOptions(sources=sources, out=folder / "data", sparse=sparse, valid_fraction=valid))


def make_config(dataset: Dataset, run_dir: Path, **sections: Any) -> tuple[RunConfig, list[str]]:
    """Return a config as `meseta train --data` makes it, and the keys that a search may decide."""
    document = {"run_dir": str(run_dir), "data": {"dir": str(dataset.dir)}, "num_threads": 1, **deepcopy(sections)}
    document |= {"report": {"importance": False}}
    free = find_free_keys(document, SEARCHED_KEYS)
    choose_settings(document, dataset)
    return validate_document(document), free


def read_trials(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "trials.json").read_text())
