"""Parts of benchmarks/bench_first_hour.py, on a small sample: planted logs, layouts and resumption."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.csv
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from meseta.data import PrepareOptions
from meseta.data.prepare import read_layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("bench_first_hour")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("place", range(8))
def test_a_planted_log_can_be_learned(bench: ModuleType, tmp_path: Path, place: int) -> None:
    log = bench.LOGS[place]
    written = bench.write_log(log, tmp_path, seed=1, num_rows=4000)
    assert 0.6 < written.best_auc < 0.97
    table = pyarrow.csv.read_csv(written.train)
    assert len(table) == 4000 and 0.1 < np.mean(table["label"].to_numpy()) < 0.7
    layout = read_layout(PrepareOptions(sources=[str(written.train)], out=tmp_path / "out"))
    used = [name for column in layout.sparse for name in column.columns]
    # Each categorical column is used as one, or ignored.
    assert {*log.sparse} <= {*used, *layout.ignored}
    again = bench.write_log(log, tmp_path / "again", seed=1, num_rows=4000)
    assert again.train.read_bytes() == written.train.read_bytes()


def test_effects_of_pairs_are_planted_only_in_the_logs_that_declare_them(bench: ModuleType, tmp_path: Path) -> None:
    """A logistic regression on single columns falls short of the truth only if the log has effects of pairs of
    columns."""
    short = {}
    for log in bench.LOGS:
        if log.name in ("many_epochs", "one_strong"):
            written = bench.write_log(log, tmp_path / log.name, seed=0, num_rows=20_000)
            train, test = (pyarrow.csv.read_csv(path) for path in (written.train, written.test))
            encoder = OneHotEncoder(handle_unknown="ignore")
            ids = [np.stack([t[name].to_numpy() for name in log.sparse], axis=1).astype(str) for t in (train, test)]
            rows = [encoder.fit_transform(ids[0]), encoder.transform(ids[1])]
            if "score" in train.column_names:
                scores = [np.tanh(1.5 * t["score"].to_numpy())[:, None] for t in (train, test)]
                rows = [sparse.hstack([row, score]) for row, score in zip(rows, scores, strict=True)]
            model = LogisticRegression(C=0.3, max_iter=300).fit(rows[0], train["label"].to_numpy())
            auc = roc_auc_score(test["label"].to_numpy(), model.predict_proba(rows[1])[:, 1])
            short[log.name] = written.best_auc - auc
    assert short["many_epochs"] > 0.05 and short["one_strong"] < 0.01


def test_an_interrupted_benchmark_resumes(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_SETTINGS", 1)
    monkeypatch.setattr(bench, "NUM_LINEAR", 1)
    log = next(log for log in bench.LOGS if log.name == "few_rows")
    commands: list[tuple[object, ...]] = []

    def one_command(*arguments: object) -> dict[str, float]:
        commands.append(arguments)
        return {"test": 0.7, "seconds": 1.0}

    monkeypatch.setattr(bench, "one_command", one_command)
    kept = bench.ResultStore(tmp_path / "cells.json")
    first = bench.measure(log, 0, kept, tmp_path, num_rows=500)
    assert len(commands) == 1 and set(first) == {"best", "one command", "logistic regression", "sweep"}
    again = bench.measure(log, 0, bench.ResultStore(tmp_path / "cells.json"), tmp_path, num_rows=500)
    assert again == first and len(commands) == 1
    *_, mean = bench.table({"few_rows": [first, first]})
    assert f"{0.7 - first['sweep']:+.4f} (asked: -{bench.MEAN_LIMIT})" in mean
