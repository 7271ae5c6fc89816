"""Runs with random settings and the schema of a person who knows the data."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.planted_logs import WrittenLog
from meseta.comm import World
from meseta.config import read_config_document, validate_document
from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare
from meseta.train.interop.default_settings import default_batch_size
from meseta.train.trainer import Trainer

LARGE_ROWS = 500_000
Settings = Mapping[str, Any]


def draw_settings(number: int) -> tuple[Settings, int | None]:
    """Return a random setting and the minimum count of its vocabulary, which is `None` for hashing."""
    draw = random.Random(f"first hour {number}")
    model = draw.choice(["deepfm", "dlrm", "dlrm_dcnv2", "wide_deep"])
    widths = draw.choice([[64, 32], [128, 64], [256, 128]])
    dim = draw.choice([4, 8, 16, 32])
    chosen: dict[str, Any] = {
        "model.name": model,
        "model.embedding_dim": dim,
        "embedding.init.scale": draw.choice([0.01, 0.03, 0.1]),
        "embedding.optimizer.lr": round(10 ** draw.uniform(-2, -0.7), 4),
        "dense.optimizer.lr": round(10 ** draw.uniform(-3.5, -2.5), 5),
        "model.dropout": draw.choice([0.0, 0.2, 0.4]),
        "embedding.regularization.l2": draw.choice([0.0, 0.0, 1e-6, 1e-5, 1e-4]),
    }
    if model.startswith("dlrm"):
        chosen |= {"model.bottom_mlp": widths[:1], "model.top_mlp": widths}
    else:
        chosen |= {"model.deep_mlp": widths}
    if model == "dlrm_dcnv2":
        chosen |= {"model.cross_layers": 2, "model.cross_low_rank": 32}
    return chosen, draw.choice([None, 2, 5])


class Tuned:
    """Runs on a log whose `sparse` columns are categories, and `dense` columns numbers.

    `options` are further options of the preparation.
    """

    def __init__(
        self,
        written: WrittenLog,
        folder: Path,
        seed: int,
        *,
        sparse: Sequence[str],
        dense: Sequence[str] = ("*",),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._written, self._folder, self._seed = written, folder, seed
        self._columns = {"sparse": sparse, "dense": dense, **(options or {})}

    def run(self, chosen: Settings, min_count: int | None, *, has_buckets: bool = False) -> dict[str, Any]:
        start_s = time.perf_counter()
        data, run_dir = self._prepared(min_count, has_buckets=has_buckets), self._folder / "tuned"
        shutil.rmtree(run_dir, ignore_errors=True)
        num_rows = data.splits["train"].num_rows
        document = read_config_document(None, [f"{key}={json.dumps(value)}" for key, value in chosen.items()])
        document |= {"run_dir": str(run_dir), "seed": self._seed}
        document["data"] = {"dir": str(data.dir)}
        document["train"] = {
            "batch_size": default_batch_size(num_rows),
            "epochs": 4 if num_rows > LARGE_ROWS else 12,
            "eval_every_epochs": 0.5 if num_rows > LARGE_ROWS else 1,
            "early_stopping": {"metric": "auc", "patience": 2},
            "finish": "best",
            "log_every_steps": 10_000,
        }
        with contextlib.redirect_stderr(io.StringIO()):
            summary = Trainer(validate_document(document), World.single()).run()
        shutil.rmtree(run_dir)
        metrics = {split: summary[split]["auc"] for split in ("valid", "test")}
        return {**metrics, "seconds": time.perf_counter() - start_s}

    def _prepared(self, min_count: int | None, *, has_buckets: bool) -> Dataset:
        out = self._folder / f"data-{min_count or 'hash'}{'-buckets' if has_buckets else ''}"
        if out.exists():
            return Dataset.load(out)
        return prepare(
            PrepareOptions(
                sources=[str(self._written.train)],
                test_files=[str(self._written.test)],
                valid_fraction=0.1,
                out=out,
                vocabulary=min_count is not None,
                min_count=min_count or 1,
                default_buckets=has_buckets,
                **self._columns,
            )
        )
