"""A small table and a run that was trained on it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meseta
from small_run import tiny_data

CONFIG = {
    "model": {"name": "deepfm", "embedding_dim": 4, "deep_mlp": [8]},
    "embedding": {"optimizer": {"lr": 0.05}},
    "train": {"batch_size": 64, "log_every_steps": 5},
}


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """1,500 rows with columns of six kinds: booleans, floats, integers, text, and lists of ids and of weights."""
    return pq.read_table(tiny_data(tmp_path_factory.getbasetemp()).with_name("tiny.parquet"))


@pytest.fixture(scope="session")
def trained(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> meseta.Run:
    """A run on rows in memory."""
    return meseta.fit(table, "label", config=CONFIG, run_dir=tmp_path_factory.mktemp("fit") / "run")
