"""Metrics over an epoch by group: scikit-learn's, in any order, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from meseta.comm import World
from meseta.spec import MesetaError
from meseta.train.background_metrics import BackgroundMetrics
from meseta.train.daily import binned_epoch
from meseta.train.daily.sample_groups import MAX_HOURS
from meseta.train.running_metrics import RunningMetrics
from train.daily.epoch_cases import (
    Rows,
    add_in_batches,
    draw_rows,
    groups_of,
    make_metrics,
    of_tasks,
    oracle,
    records,
    to_batch,
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hours": {"num_hours": 5},
    "weights": {"num_hours": 3, "weighted": True},
    "missing labels": {"num_tasks": 2, "num_hours": 2, "weighted": True, "masked": True},
}


def draw_case(name: str, num_samples: int = 3000) -> Rows:
    return draw_rows(num_samples, **CASES[name])


@pytest.mark.parametrize("is_binned", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_groups_equal_scikit_learn(name: str, is_binned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meseta.train.daily.epoch_metrics.BINNING_SAMPLES", 500)
    rows, num_tasks = draw_case(name), CASES[name].get("num_tasks", 1)
    metrics = make_metrics(num_tasks, **({"max_exact_samples": 1000} if is_binned else {}))
    add_in_batches(metrics, rows)
    made, groups = records(metrics.compute()), groups_of(rows)
    assert list(made) == list(groups)
    for group, places in groups.items():
        for task, values in enumerate(of_tasks(made[group], num_tasks)):
            expected, bound = oracle(rows.take(places), task), values.auc_error_bound
            assert (bound is not None) is is_binned
            for key, value in expected.items():
                error = bound if key == "auc" and bound is not None else 1e-9 * abs(value)
                assert abs(getattr(values, key) - value) <= error, (group, key)


def test_groups_add_up() -> None:
    rows = draw_case("weights")
    metrics = make_metrics(1)
    add_in_batches(metrics, rows)
    record = metrics.compute()
    for groups in ([record.with_new_ids, record.without_new_ids], list(record.by_hour.values())):
        parts = [group for group in groups if group is not None]
        assert sum(group.num_samples or 0 for group in parts) == record.total.num_samples
        assert sum(group.num_positives or 0 for group in parts) == record.total.num_positives
        weight = sum(group.weight or 0 for group in parts)
        assert weight == pytest.approx(record.total.weight, rel=1e-12)
        loss = sum((group.weight or 0) * (group.logloss or 0) for group in parts)
        assert loss / weight == pytest.approx(record.total.logloss, rel=1e-12)


@pytest.mark.parametrize("max_exact_samples", [1 << 20, 1000, 0])
@pytest.mark.parametrize("name", ["hours", "missing labels"])
def test_a_resumed_run_has_the_same_bits(name: str, max_exact_samples: int) -> None:
    rows, num_tasks = draw_case(name), CASES[name].get("num_tasks", 1)
    first, order = np.arange(1400), np.random.default_rng(1).permutation(np.arange(1400, 3000))
    whole = make_metrics(num_tasks, max_exact_samples=max_exact_samples)
    add_in_batches(whole, rows)
    stopped = make_metrics(num_tasks, max_exact_samples=max_exact_samples)
    add_in_batches(stopped, rows.take(first))
    resumed = make_metrics(num_tasks, max_exact_samples=max_exact_samples)
    resumed.set_tensors(stopped.get_tensors())
    add_in_batches(resumed, rows.take(order), size=211)
    assert resumed.compute() == whole.compute()
    tensors, expected = resumed.get_tensors(), whole.get_tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in tensors)


def test_a_checkpoint_without_these_metrics_starts_empty() -> None:
    metrics = make_metrics(1)
    add_in_batches(metrics, draw_case("plain"))
    metrics.set_tensors({"model.weight": torch.ones(2), "window.label0.logits": torch.ones(2)})
    record = metrics.compute()
    assert record.total.num_samples == 0
    assert record.total.auc is None
    assert record.by_hour == {}


@pytest.mark.parametrize("max_exact_samples", [1 << 20, 0])
def test_many_hours_become_hours_of_the_day(max_exact_samples: int) -> None:
    rows = draw_rows(3000, num_hours=MAX_HOURS + 2)
    metrics = make_metrics(1, max_exact_samples=max_exact_samples)
    add_in_batches(metrics, rows, size=50)
    made, groups = records(metrics.compute()), groups_of(rows, "%H")
    assert list(made) == list(groups)
    for name, places in groups.items():
        assert made[name].num_samples == places.sum()
        assert made[name].ne == pytest.approx(oracle(rows.take(places), 0)["ne"], rel=1e-9)
    resumed = make_metrics(1, max_exact_samples=max_exact_samples)
    resumed.set_tensors(metrics.get_tensors())
    assert resumed.compute() == metrics.compute()


def test_times_beyond_all_calendars_are_unknown() -> None:
    rows = draw_rows(50, num_hours=1)
    metrics = make_metrics(1)
    add_in_batches(metrics, rows._replace(times=np.resize([1e30, -1e30, np.inf, np.nan, 0.0], 50)))
    assert {name: group.num_samples for name, group in metrics.compute().by_hour.items()} == {
        "1970-01-01T00": 10,
        "unknown": 40,
    }


@pytest.mark.parametrize("max_exact_samples", [1 << 20, 0])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda rows: rows._replace(logits=np.where(np.arange(200) == 7, np.nan, rows.logits)), "must be finite"),
        (lambda rows: rows._replace(labels=np.where(np.arange(200) == 7, 0.5, rows.labels)), "must be 0 or 1"),
    ],
)
def test_invalid_values(spoil: Callable[[Rows], Rows], problem: str, max_exact_samples: int) -> None:
    metrics = make_metrics(1, max_exact_samples=max_exact_samples)
    spoiled = spoil(draw_rows(200))
    add_in_batches(
        metrics, spoiled._replace(logits=spoiled.logits.astype(np.float32), labels=spoiled.labels.astype(np.float32))
    )
    with pytest.raises(MesetaError, match=problem):
        metrics.compute()


def test_float64_logits_are_not_rounded() -> None:
    rows = draw_rows(400)
    logits = np.arange(400) * 1e-12
    metrics = make_metrics(1)
    metrics.add(torch.from_numpy(logits), to_batch(rows))
    assert metrics.compute().total.auc == oracle(rows._replace(logits=logits), 0)["auc"]  # type: ignore[arg-type]


def test_negative_zero_ties_with_zero() -> None:
    rows = draw_rows(4)._replace(
        logits=np.array([0.0, -0.0, -0.0, 0.0], np.float32), labels=np.array([1, 0, 1, 0], np.float32)
    )
    metrics = make_metrics(1)
    add_in_batches(metrics, rows)
    assert metrics.compute().total.auc == 0.5


def test_the_thread_of_metrics_adds_all_steps_without_padding() -> None:
    rows = draw_rows(600, num_hours=2)
    expected, metrics = make_metrics(1), make_metrics(1)
    add_in_batches(expected, rows, size=100)
    background = BackgroundMetrics(RunningMetrics(["label0"], None, World.single()), World.single(), metrics)
    for start in range(0, 600, 100):
        part = rows.take(np.r_[start : start + 100, [599] * 5])
        background.add(torch.from_numpy(part.logits), to_batch(part, num_padding=5))
    background.wait()
    background.close()
    assert metrics.compute() == expected.compute()


def test_memory_of_binned_hours_is_bounded() -> None:
    binned = binned_epoch.BinnedEpoch(["label"])
    codes = 2 * np.arange(400)
    binned.add({"label": {"logits": np.zeros(400, np.float32), "labels": np.ones(400, np.uint8), "groups": codes}})
    assert sum(column.nbytes for column in binned.get_state().values()) < 10e6
