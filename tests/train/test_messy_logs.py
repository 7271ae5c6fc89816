"""Parts of benchmarks/bench_messy_logs.py, on a small sample: laws of the logs, and rows of LightGBM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
from common.lightgbm_trials import save_rows
from common.messy_logs import LOGS, MessyLog
from sklearn.metrics import roc_auc_score

from sampling import sample

NUM_ROWS = 4000


def find_log(name: str) -> MessyLog:
    return next(log for log in LOGS if log.name == name)


def test_half_of_the_logs_write_times_as_text() -> None:
    assert len(LOGS) == 12 and sum(log.times.is_text for log in LOGS) == 6
    assert all(20_000 <= log.num_rows <= 300_000 and log.num_test_rows >= 200_000 for log in LOGS)
    # Of each kind there are at least 300 columns in three seeds.
    assert sum(len(log.useful) for log in LOGS) >= 100 and sum(len(log.noise) for log in LOGS) >= 100


@pytest.mark.parametrize("name", sample([log.name for log in LOGS], k=3, seed=102))
def test_columns_as_written_determine_the_labels(tmp_path: Path, name: str) -> None:
    log = find_log(name)
    written = log.write(tmp_path, seed=1, num_rows=NUM_ROWS)
    train, test = log.read(written.train), log.read(written.test)
    logits = log.logits(1, test)
    assert roc_auc_score(test["label"], logits) == written.best_auc
    assert train[log.times.name].max() < test[log.times.name].min()
    assert (np.diff(train[log.times.name]) >= 0).all()

    def close(value: float, share: float, num_rows: int) -> bool:
        return abs(value - share) <= 4 * (share * (1 - share) / num_rows) ** 0.5

    assert close(np.mean([train["label"], test["label"]]), log.positives, 2 * NUM_ROWS)
    raw = pyarrow.csv.read_csv(written.train, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True))
    for column in (*log.ids, *log.numbers):
        assert close(raw[column.name].null_count / NUM_ROWS, column.missing, NUM_ROWS), column.name
    # Noise has no effect, and each useful column has one.
    for column in (*log.ids, *log.numbers):
        changed = log.logits(1, {**test, column.name: test[column.name][::-1]})
        is_noise = np.array_equal(changed, logits)
        assert is_noise == (column.name in log.noise) == (column.name not in log.useful), column.name


def test_rows_of_lightgbm_are_split_by_time_and_unseen_ids_are_missing(tmp_path: Path) -> None:
    log = find_log("missing")
    written = log.write(tmp_path, seed=0, num_rows=NUM_ROWS)
    train, test = log.read(written.train), log.read(written.test)
    save_rows(tmp_path / "rows.npz", train, test, log.sparse, log.times.name)
    with np.load(tmp_path / "rows.npz") as file:
        rows = dict(file)
    num_train = len(rows["train_x"])
    assert num_train + len(rows["valid_x"]) == NUM_ROWS and 0.9 * NUM_ROWS <= num_train < 0.91 * NUM_ROWS
    assert train[log.times.name][num_train - 1] < train[log.times.name][num_train]
    for place, name in enumerate(log.sparse):
        is_seen = np.isin(test[name], train[name][train[name] >= 0])
        assert np.array_equal(np.isnan(rows["test_x"][:, place]), ~is_seen)
        # One category for each id.
        pairs = {*zip(test[name][is_seen], rows["test_x"][is_seen, place], strict=True)}
        assert len(pairs) == len({first for first, _ in pairs}) == len({second for _, second in pairs})
    age = rows["test_x"][:, -1]
    assert age.min() > 13.9 and age.max() < 15
