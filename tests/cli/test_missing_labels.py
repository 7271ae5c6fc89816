"""Tests of commands on samples without labels: each task has the metrics that scikit-learn computes on its labeled
samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from data.missing_labels import ROWS, columns, write
from meseta.data import Dataset
from small_run import settings, write_config


def test_training_measures_each_task_on_its_own_samples(tmp_path: Path, output_of: Callable[..., str]) -> None:
    source = write(tmp_path / "log.csv", columns())
    output_of("prepare", source, "--out", tmp_path / "data", "--label", "click,bought", "--ignore", "row",
              "--test-fraction", 0.3)  # fmt: skip
    changes: dict[str, Any] = {"train__batch_size": 64, "train__accumulate_steps": 2}
    changes |= {"data__last_batch": "pad", "model__num_experts": 2, "model__expert_mlp": [8], "model__tower_mlp": [4]}
    config = write_config(
        tmp_path / "c.yaml", settings(tmp_path / "data", tmp_path / "run", model__name="mmoe", **changes)
    )
    output_of("train", config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    output_of("predict", tmp_path / "run", "--out", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    for task in ("click", "bought"):
        label, score = (scores[f"{kind}.{task}"].to_numpy() for kind in ("label", "prediction"))
        known = ~np.isnan(label)
        assert 0 < known.sum() < len(known) == Dataset.load(tmp_path / "data").splits["test"].num_rows
        figures = summary["test"]["tasks"][task]
        assert figures["num_samples"] == known.sum()
        assert figures["auc"] == pytest.approx(roc_auc_score(label[known], score[known]), abs=1e-9)
        assert figures["logloss"] == pytest.approx(log_loss(label[known], score[known].astype(np.float64)), rel=1e-5)
    output_of("predict", tmp_path / "run", "--data", source, "--keys", "city", "--out", tmp_path / "new.csv")
    assert len((tmp_path / "new.csv").read_text().splitlines()) == ROWS + 1  # those without any label, too
