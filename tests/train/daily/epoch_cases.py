"""Random predictions with ties, weights, missing labels, times and new ids, and their metrics by scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from meseta.comm import World
from meseta.data import Batch
from meseta.sparse import KeyedJaggedTensor
from meseta.train.daily.epoch_metrics import EpochMetrics
from meseta.train.daily.new_ids import NewIds

NUM_ROWS = 40


class Rows(NamedTuple):
    """Columns of n samples."""

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    label_mask: NDArray[np.bool_] | None
    times: NDArray[np.float64] | None
    ids: NDArray[np.int64]

    def take(self, places: NDArray[Any]) -> Rows:
        return Rows(*(None if column is None else column[places] for column in self))


def draw_rows(
    num_samples: int,
    num_tasks: int = 1,
    *,
    weighted: bool = False,
    masked: bool = False,
    num_hours: int | None = None,
    seed: int = 0,
) -> Rows:
    """Return rows in which a tenth has no time. `num_hours` of `None` means no times."""
    draw = np.random.default_rng(seed)
    shape = (num_samples,) if num_tasks == 1 else (num_samples, num_tasks)
    labels = (draw.random(shape) < 0.3).astype(np.float32)
    times = None
    if num_hours is not None:
        times = 1.7e9 + draw.random(num_samples) * num_hours * 3600
        times[draw.random(num_samples) < 0.1] = np.nan
    return Rows(
        logits=np.round(draw.normal(-1, 1, shape) + labels, 1).astype(np.float32) * np.float32(1.0),
        labels=labels,
        weights=draw.exponential(size=num_samples).astype(np.float32) * (draw.random(num_samples) < 0.8)
        if weighted
        else None,
        label_mask=draw.random(shape) < 0.7 if masked else None,
        times=times,
        ids=draw.integers(0, NUM_ROWS, num_samples),
    )


def to_batch(rows: Rows, num_padding: int = 0) -> Batch:
    tensors = [None if column is None else torch.from_numpy(column) for column in rows]
    _, labels, weights, label_mask, times, ids = tensors
    assert labels is not None
    assert ids is not None
    return Batch(
        dense=torch.zeros(len(ids), 1),
        sparse=KeyedJaggedTensor.from_single_ids(["item"], ids),
        label=labels,
        weight=weights,
        label_mask=label_mask,
        time=times,
        num_padding=num_padding,
    )


def new_rows() -> NDArray[np.bool_]:
    return np.arange(NUM_ROWS) % 3 == 1


def make_metrics(num_tasks: int, world: World | None = None, **options: Any) -> EpochMetrics:
    feature = SimpleNamespace(name="item", num_embeddings=NUM_ROWS, encoding="hash")
    new_ids = NewIds(SimpleNamespace(sparse=[feature], dir=""), {"item": new_rows()})  # type: ignore[arg-type]
    return EpochMetrics([f"label{k}" for k in range(num_tasks)], new_ids, world or World.single(), **options)


def add_in_batches(metrics: EpochMetrics, rows: Rows, size: int = 97, rank: int = 0, num_ranks: int = 1) -> None:
    """Add this rank's slices of the rows, in batches of `size`."""
    for start in range(0, len(rows.ids), size):
        part = np.array_split(np.arange(start, min(start + size, len(rows.ids))), num_ranks)[rank]
        sliced = rows.take(part)
        metrics.add(torch.from_numpy(sliced.logits), to_batch(sliced))


def hour_names(times: NDArray[np.float64], pattern: str) -> list[str]:
    return ["unknown" if np.isnan(t) else datetime.fromtimestamp(t, UTC).strftime(pattern) for t in times.tolist()]


def groups_of(rows: Rows, pattern: str = "%Y-%m-%dT%H") -> dict[str, NDArray[np.bool_]]:
    """Return which rows each group has."""
    is_new = new_rows()[rows.ids]
    groups = {"total": np.ones(len(rows.ids), np.bool_), "new": is_new, "old": ~is_new}
    if rows.times is not None:
        names = np.array(hour_names(rows.times, pattern))
        groups |= {name: names == name for name in sorted(set(names))}
    return groups


def oracle(rows: Rows, task: int) -> dict[str, float]:
    """Return metrics of a task by scikit-learn."""
    logits, labels = (column if column.ndim == 1 else column[:, task] for column in (rows.logits, rows.labels))
    weights = np.ones(len(labels)) if rows.weights is None else rows.weights.astype(np.float64)
    if rows.label_mask is not None:
        weights = weights * (rows.label_mask if rows.label_mask.ndim == 1 else rows.label_mask[:, task])
    kept = weights > 0
    logits, labels, weights = logits[kept].astype(np.float64), labels[kept], weights[kept]
    probabilities = 1 / (1 + np.exp(-logits))
    rate = np.average(labels, weights=weights)
    loss = log_loss(labels, probabilities, sample_weight=weights, labels=[0, 1])
    return {
        "num_samples": int(kept.sum()),
        "num_positives": int(labels.sum()),
        "weight": weights.sum(),
        "logloss": loss,
        "ne": loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)),
        "auc": roc_auc_score(labels, logits, sample_weight=weights),
        "calibration": np.average(probabilities, weights=weights) / rate,
    }


def records(metrics: Any) -> dict[str, Any]:
    """Return the groups of a record by the names of `groups_of`."""
    return {
        "total": metrics.total,
        "new": metrics.with_new_ids,
        "old": metrics.without_new_ids,
        **metrics.by_hour,
    }


def of_tasks(group: Any, num_tasks: int) -> Sequence[Any]:
    return [group] if num_tasks == 1 else [group.tasks[f"label{k}"] for k in range(num_tasks)]
