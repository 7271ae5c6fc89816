"""Metrics by task and by segment, against scikit-learn on selected samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from meseta.spec import MesetaError
from meseta.train.metrics import LifetimeWindow, MetricWindow, TaskWindows, segment_metrics

TASKS = ("click", "buy", "like")


def samples(num: int = 400) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(3)
    logits = np.round(draw.normal(size=(num, 3)), 1)
    labels = (draw.random((num, 3)) < 1 / (1 + np.exp(1 - logits))).astype(np.float32)
    return logits, labels, draw.exponential(size=num), draw.zipf(1.6, num) % 50


def filled() -> tuple[TaskWindows[MetricWindow], tuple[np.ndarray, ...]]:
    logits, labels, weights, keys = samples()
    windows = TaskWindows(TASKS, MetricWindow)
    for part in np.array_split(np.arange(len(keys)), 7):
        windows.add(logits[part], labels[part], weights[part])
    return windows, (logits, labels, weights, keys)


def expected(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    rate = np.average(labels, weights=weights)
    loss = log_loss(labels, 1 / (1 + np.exp(-logits)), sample_weight=weights, labels=[0, 1])
    return {
        "logloss": loss,
        "ne": loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)),
        "auc": roc_auc_score(labels, logits, sample_weight=weights),
        "pr_auc": average_precision_score(labels, logits, sample_weight=weights),
    }


def test_every_task_has_its_own_metrics() -> None:
    windows, (logits, labels, weights, _) = filled()
    for place, task in enumerate(TASKS):
        computed = windows[task].compute().to_dict()
        for name, value in expected(logits[:, place], labels[:, place], weights).items():
            assert computed[name] == pytest.approx(value, abs=1e-6), (task, name)


def test_the_largest_segments_come_first_and_the_rest_together() -> None:
    windows, (logits, labels, weights, keys) = filled()
    segments = segment_metrics(windows, keys, 3)
    values, counts = np.unique(keys, return_counts=True)
    largest = sorted(zip((-counts).tolist(), values.tolist(), strict=True))[:3]
    assert [(-segment.metrics["buy"].num_samples, segment.value) for segment in segments[:3]] == largest
    assert segments[3].value is None and len(segments) == 4
    picked = [keys == value for _, value in largest] + [~np.isin(keys, [value for _, value in largest])]
    for segment, rows in zip(segments, picked, strict=True):
        document = segment.to_dict()
        for place, task in enumerate(TASKS):
            for name, value in expected(logits[rows, place], labels[rows, place], weights[rows]).items():
                assert document["tasks"][task][name] == pytest.approx(value, abs=1e-6)
        assert document["auc"] == document["tasks"]["click"]["auc"] and "reliability" not in document


def test_one_label_needs_no_second_dimension_and_lists_no_tasks() -> None:
    logits, labels, weights, keys = samples()
    windows = TaskWindows(("label",), MetricWindow)
    windows.add(logits[:, 0], labels[:, 0], weights)
    [segment] = segment_metrics(windows, np.full(len(keys), 7), 10)
    assert segment.value == 7 and "tasks" not in segment.to_dict()
    assert segment.metrics["label"] == windows["label"].compute()


def test_states_go_through_a_checkpoint_and_are_merged() -> None:
    windows, _ = filled()
    again = TaskWindows(TASKS, MetricWindow)
    again.set_state(windows.get_state())
    assert again["like"].compute() == windows["like"].compute()
    twice = windows.merge([windows.get_state()] * 2)
    assert twice["buy"].compute().num_samples == 2 * windows["buy"].compute().num_samples
    with pytest.raises(MesetaError, match="no window of task 'click'"):
        again.set_state({"buy": windows.get_state()["buy"]})


@pytest.mark.parametrize(
    ("tasks", "logits", "labels"),
    [(TASKS, (4,), (4,)), (TASKS, (4, 2), (4, 3)), (TASKS, (4, 3), (4,)), (("label",), (4, 2), (4, 2))],
)
def test_other_numbers_of_tasks_are_refused(tasks: tuple[str, ...], logits: tuple, labels: tuple) -> None:
    with pytest.raises(MesetaError, match="use a model with one output per label of the dataset"):
        TaskWindows(tasks, LifetimeWindow).add(np.zeros(logits), np.zeros(labels))
