"""Parts of benchmarks/bench_chosen_split.py: rows, selection and intervals."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader

FILE = Path(__file__).parents[2] / "benchmarks/bench_chosen_split.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_chosen_split", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def labels(dataset: Dataset, split: str) -> list[float]:
    with_all = Reader(dataset, split, ReaderOptions(batch_size=1 << 20))
    return [float(label) for batch in with_all.epoch() for label in batch.label]


def test_both_splits_to_select_on_have_the_same_rows(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"train": 300, "valid": 60, "test": 60, "untouched": 200}
    monkeypatch.setattr(bench, "NUM_ROWS", sizes)
    folders = bench.prepare_rows(tmp_path / "rows", 5)
    datasets = {chooser: Dataset.load(folder) for chooser, folder in folders.items()}
    assert set(datasets["valid"].splits) == set(sizes) == {*datasets["test"].splits, "valid"}
    for split, num_rows in sizes.items():
        values = labels(datasets["valid"], split)
        assert len(values) == num_rows == datasets["valid"].split(split).num_rows
        assert sum(values) == datasets["valid"].split(split).num_positives
        if split != "valid":
            assert labels(datasets["test"], split) == values
    runs: dict[str, Any] = {}
    config = bench.settings(folders["valid"], tmp_path, 0)
    short = {"epochs": 2, "eval_every_epochs": 1.0}
    monkeypatch.setattr(
        bench, "settings",
        lambda data, run_dir, seed: config.model_copy(
            update={
                "run_dir": run_dir,
                "data": config.data.model_copy(update={"dir": data}),
                "train": config.train.model_copy(update=short),
            }
        ),
    )  # fmt: skip
    for chooser, folder in folders.items():
        runs[chooser] = bench.choose(folder, tmp_path / f"run-{chooser}", 0)
        assert 0 < runs[chooser].test < 1 and runs[chooser].step in (3, 6)
        assert runs[chooser].flattery == runs[chooser].test - runs[chooser].untouched
    assert len(bench.lines([runs, runs])) == 4


def test_the_interval_is_students(bench: ModuleType) -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, 20)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert bench.interval(values) == pytest.approx((values.mean(), expected.low, expected.high))
