"""Choice between trials by a metric, and its price in another."""

from __future__ import annotations

import pytest

from meseta.telemetry.metrics_file import EvalLine, EvalMetrics
from meseta.telemetry.summary import TrialEntry
from meseta.train.search.choice import describe_trade_off, is_better, select_best, trial_entry

TRIALS = [
    TrialEntry(settings={"lr": 1}, auc=0.70, logloss=0.50),
    TrialEntry(settings={"lr": 2}, auc=0.7011, logloss=0.575),
    TrialEntry(settings={"lr": 3}, auc=0.69, logloss=0.60),
]


def test_metrics_have_their_directions() -> None:
    assert select_best([trial.auc for trial in TRIALS], "auc") == 1
    assert select_best([trial.logloss for trial in TRIALS], "logloss") == 0
    assert select_best([None, float("nan")], "auc") is None and select_best([None, 0.1], "auc") == 1
    assert not is_better(0.5, 0.5, "auc") and is_better(0.5, None, "ne") and not is_better(None, None, "ne")


def test_the_trade_off_names_the_other_choice() -> None:
    by_auc = describe_trade_off(TRIALS, 1, "auc")
    assert by_auc.startswith("the log loss would choose lr=1: AUC -0.0011, log loss -13.0 %")
    by_logloss = describe_trade_off(TRIALS, 0, "logloss")
    assert by_logloss.startswith("the AUC would choose lr=2: AUC +0.0011, log loss +15.0 %")
    assert describe_trade_off(TRIALS[1:], 0, "auc") == "" == describe_trade_off(TRIALS, None, "auc")


@pytest.mark.parametrize(("task", "value"), [(None, 0.6), ("buy", 0.8), ("none", None)])
def test_the_value_is_that_of_the_task(task: str | None, value: float | None) -> None:
    tasks = {"click": EvalMetrics(auc=0.6, logloss=0.5), "buy": EvalMetrics(auc=0.8, logloss=0.1)}
    assert trial_entry({}, EvalLine(auc=0.6, logloss=0.5, tasks=tasks), "auc", task).value == value
