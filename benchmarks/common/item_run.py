"""Runs with one large table, `item`, whose ids are random, so that most rows are not cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.prepare import PrepareOptions, prepare

WIDTH, ROW_BYTES, BATCH_SIZE = 64, 260, 2048


def make_data(folder: Path, num_rows: int, num_samples: int) -> Path:
    """Prepare samples, unless they exist."""
    out = folder / f"data-{num_rows}"
    if not out.exists():
        random = np.random.default_rng(0)
        columns = {
            "label": random.random(num_samples) < 0.3,
            "price": random.standard_normal(num_samples),
            "item": pa.array(random.integers(0, num_rows, num_samples)),
            "city": pa.array(random.integers(0, 1000, num_samples)),
        }
        pq.write_table(pa.table(columns), folder / "samples.parquet")
        rows = {"item": num_rows, "city": 1000}
        options = {"test_fraction": 0.1, "hash_rows_by_feature": rows, "sparse": list(rows)}
        prepare(PrepareOptions(sources=[str(folder / "samples.parquet")], out=out, **options))
    return out


def make_config(run_dir: Path, data: Path, tier: str, cache_bytes: int, num_steps: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "run_dir": str(run_dir),
        "data": {"dir": str(data)},
        "model": {"embedding_dim": WIDTH, "bottom_mlp": [WIDTH], "top_mlp": [64]},
        "embedding": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
        "train": {"batch_size": BATCH_SIZE, "eval_batch_size": BATCH_SIZE, "max_steps": num_steps},
        "checkpoint": {"keep_last": 1},
        "plan": {"tables": {"item": {"sharding": "table_wise", "tier": tier}, "*": "table_wise"}},
    }
    if tier != "hbm":
        document["storage"] = {"dir": str(run_dir.parent / "rows"), "cache_bytes": cache_bytes}
    return document
