"""Metrics in the log lines of training: over the samples since the previous line, and over the run so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.ops.common import AsyncHostCopy
from meseta.pipeline.update_check import LossAgreement
from meseta.telemetry.row_traffic import RowTraffic
from meseta.train.evaluate import gather_windows
from meseta.train.metrics import LifetimeMetrics, LifetimeWindow, Metrics, MetricWindow, TaskWindows


class TrainingClock:
    """Clock of the training time of a run, without evaluations and checkpoints. A lap lasts from one log line to the
    next."""

    def __init__(self) -> None:
        self.train_s = 0.0
        """Seconds up to the end of the last lap."""
        self._begin_s = time.perf_counter()

    @property
    def lap_s(self) -> float:
        """Seconds of the current lap."""
        return time.perf_counter() - self._begin_s

    def start(self) -> None:
        """Start a lap."""
        self._begin_s = time.perf_counter()

    def lap(self) -> float:
        """End the lap. Return its seconds."""
        seconds = self.lap_s
        self.train_s += seconds
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager that excludes its duration from the training time."""
        start_s = time.perf_counter()
        yield
        self._begin_s += time.perf_counter() - start_s


class StepPredictions(NamedTuple):
    """Predictions of a step, and the columns of its batch that metrics need. Nothing else of the batch stays alive."""

    num_samples: int
    """Number of samples without padding, which come first in each column."""
    logits: AsyncHostCopy
    """Logits [B] or [B, T], computed before the update."""
    labels: Tensor
    weights: Tensor | None
    label_mask: Tensor | None
    agreement: LossAgreement | None
    """Agreement on the loss terms. `None` if the model has none."""

    @staticmethod
    def start_copy(logits: Tensor, batch: Batch, agreement: LossAgreement | None = None) -> StepPredictions:
        """Start to copy logits [B] or [B, T] of this rank to the host, and select the columns of their `batch`."""
        return StepPredictions(
            batch.batch_size - batch.num_padding,
            AsyncHostCopy(logits),
            batch.label,
            batch.weight,
            batch.label_mask,
            agreement if agreement is not None and agreement.term_names else None,
        )

    def read(self) -> list[NDArray[Any] | None]:
        """Return logits, labels, weights and mask without padding. Waits for the copy of the logits."""
        columns = (self.logits.read(), self.labels, self.weights, self.label_mask)
        return [None if column is None else column[: self.num_samples].numpy() for column in columns]


def concatenate_steps(steps: Sequence[StepPredictions]) -> list[Any]:
    """Return logits, labels, weights and mask of steps with the same columns, without padding. Waits for the copies of
    the logits."""
    return [_concatenate(parts) for parts in zip(*(step.read() for step in steps), strict=True)]


class RunningMetrics:
    """Metrics of all training predictions, made before the update, so that each sample is new to the model.

    One thread at a time may use it, except that `pop_row_traffic` may run next to the other methods.
    """

    def __init__(self, tasks: Sequence[str], task_weights: Sequence[float] | None, world: World) -> None:
        """Create metrics of `tasks`, the labels of the dataset. The loss is the sum of task losses, weighted by
        `task_weights` [T]."""
        self.tasks = tuple(tasks)
        self._task_weights = [1.0] * len(self.tasks) if task_weights is None else list(task_weights)
        self._world = world
        self._window = TaskWindows(tasks, MetricWindow)
        # Weighted sum of each additional loss term of the model since the previous line. See `_loss_terms_weight`.
        # The sums are over all ranks, so only rank 0 has them.
        self._loss_term_sums: dict[str, float] = {}
        self._loss_terms_weight = 0.0
        # Only rank 0 has samples of earlier lines, which were gathered there. Integer sums make the order irrelevant.
        self._lifetime = TaskWindows(tasks, LifetimeWindow)
        # Total row traffic up to the previous line, by table.
        self._row_traffic: dict[str, RowTraffic] = {}

    def add(self, steps: Sequence[StepPredictions]) -> None:
        """Add the predictions of successive steps. Waits for the copies of their logits."""
        for step in steps:
            if step.agreement is not None and self._world.rank == 0:
                weight_of_all = step.agreement.global_totals.weight
                for name, mean in step.agreement.terms.items():
                    self._loss_term_sums[name] = self._loss_term_sums.get(name, 0.0) + mean * weight_of_all
                self._loss_terms_weight += weight_of_all
        # Each numpy call may take the interpreter lock from the training thread, so add several steps in one call.
        for _, group in groupby(steps, lambda step: (step.weights is None, step.label_mask is None)):
            logits, labels, weights, label_mask = concatenate_steps(list(group))
            self._window.add(logits, labels, weights, label_mask=label_mask)

    def pop_windows(self) -> list[dict[str, dict[str, NDArray[Any]]]]:
        """Return the samples of each rank since the previous line, and start the next line. Collective."""
        states = self._world.all_gather_object(self._window.get_state())
        self._window.reset()
        return states

    def compute_line(self, windows: Sequence[Mapping[str, Mapping[str, NDArray[Any]]]]) -> dict[str, Any]:
        """Return the metrics of a log line as plain data for JSON, given the result of `pop_windows`. Only for rank 0.

        "ne", "auc" and "logloss" are those of the first task. "logloss" is omitted for a single task, because it equals
        "loss". "lifetime" has the metrics of the whole run, and "tasks" the metrics of each of several tasks.
        Raises MesetaError under the conditions of `MetricWindow.compute`.
        """
        window = self._window.merge(windows)
        metrics = {task: window[task].compute() for task in self.tasks}
        for task, columns in window.get_state().items():
            self._lifetime[task].add(columns["logits"], columns["labels"], columns.get("weights"))
        by_task = {
            task: {
                **_select(metrics[task], _WINDOW_METRICS),
                "lifetime": _select(self._lifetime[task].compute(), _LIFETIME_METRICS),
            }
            for task in self.tasks
        }
        losses = [metrics[task].to_dict()["logloss"] for task in self.tasks]
        total = None if None in losses else float(np.dot(self._task_weights, losses))
        first, terms = by_task[self.tasks[0]], self._pop_loss_terms()
        if len(self.tasks) > 1:
            return {"loss": total, **terms, **first, "tasks": by_task}
        return {"loss": total, **terms, **{name: value for name, value in first.items() if name != "logloss"}}

    def _pop_loss_terms(self) -> dict[str, Any]:
        means = {name: one / (self._loss_terms_weight or 1.0) for name, one in self._loss_term_sums.items()}
        self._loss_term_sums, self._loss_terms_weight = {}, 0.0
        return {"loss_terms": means} if means else {}

    def pop_row_traffic(self, embeddings: BaseEmbeddingCollection[Any], num_steps: int) -> dict[str, Any]:
        """Return the row traffic per step of offloaded tables since the previous line, over all ranks. Collective,
        equal on all ranks."""
        if not embeddings.has_offloaded_rows:
            return {}
        before, self._row_traffic = self._row_traffic, dict[str, RowTraffic]()
        for of_rank in self._world.all_gather_object(embeddings.row_traffic):
            for table, traffic in of_rank.items():
                self._row_traffic[table] = self._row_traffic.get(table, RowTraffic()) + traffic
        return {
            "row_traffic": {
                table: (traffic - before.get(table, RowTraffic())).scaled(1.0 / max(num_steps, 1))
                for table, traffic in self._row_traffic.items()
            }
        }

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: `window.TASK.COLUMN`, `lifetime.TASK.COLUMN` and `terms.NAME`.
        Collective. Rank 0 has the samples of all ranks, and other ranks return nothing."""
        window = gather_windows(self._window, self._world).get_state()
        if self._world.rank != 0:
            return {}
        # A run that was resumed within a window has its samples in another order, so sort them to get the same file.
        kept = {
            "window": {task: _sort_samples(state) for task, state in window.items()},
            "lifetime": self._lifetime.get_state(),
        }
        columns = {
            f"{kind}.{task}.{name}": torch.from_numpy(column.copy())
            for kind, states in kept.items()
            for task, state in states.items()
            for name, column in state.items()
        }
        terms = {
            f"terms.{name}": _float64_tensor(one, self._loss_terms_weight) for name, one in self._loss_term_sums.items()
        }
        return {**columns, **terms}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of `get_tensors`. All ranks may call it, and rank 0 keeps the state."""
        if self._world.rank != 0:
            return
        kept: dict[str, dict[str, dict[str, NDArray[Any]]]] = {"window": {}, "lifetime": {}}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "terms":
                self._loss_term_sums[rest], self._loss_terms_weight = tensor.tolist()
            task, _, name = rest.rpartition(".")
            if kind in kept:
                kept[kind].setdefault(task, {})[name] = tensor.numpy()
        self._window.set_state(kept["window"])
        self._lifetime.set_state(kept["lifetime"])


def _concatenate(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else np.concatenate(parts)


def _float64_tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


_WINDOW_METRICS = ("logloss", "ne", "auc")
_LIFETIME_METRICS = ("logloss", "ne", "auc_binned", "auc_error_bound", "calibration")


def _select(metrics: Metrics | LifetimeMetrics, names: Sequence[str]) -> dict[str, Any]:
    document = metrics.to_dict()
    return {name: document[name] for name in names}


def _sort_samples(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    order = np.lexsort(tuple(reversed(list(state.values()))))
    return {name: column[order] for name, column in state.items()}
