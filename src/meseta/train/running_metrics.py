"""What the lines of training say of the model: figures since the line before, and over the run so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.ops.device_constants import AsyncHostCopy
from meseta.pipeline.agreement import LossAgreement
from meseta.telemetry.row_traffic import RowTraffic
from meseta.train.evaluate import gather_windows
from meseta.train.metrics import LifetimeMetrics, LifetimeWindow, Metrics, MetricWindow, TaskWindows


class TrainingClock:
    """Seconds that a run has trained, evaluations and checkpoints apart, in laps from one line to the next."""

    def __init__(self) -> None:
        self.train_s = 0.0
        """Up to the end of the last lap."""
        self._begin_s = time.perf_counter()

    @property
    def lap_s(self) -> float:
        """Of the lap under way."""
        return time.perf_counter() - self._begin_s

    def start(self) -> None:
        """Begin a lap."""
        self._begin_s = time.perf_counter()

    def lap(self) -> float:
        """End it; returns its seconds."""
        seconds = self.lap_s
        self.train_s += seconds
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While something is done whose time is not training time."""
        start_s = time.perf_counter()
        yield
        self._begin_s += time.perf_counter() - start_s


class RunningMetrics:
    """Fed with the predictions of every step, which were made before its update: each sample is measured unseen."""

    def __init__(self, tasks: Sequence[str], task_weights: Sequence[float] | None, world: World) -> None:
        """Figures of `tasks`, the labels of the dataset; the loss adds them by `task_weights` [T], or as they are."""
        self.tasks = tuple(tasks)
        self._task_weights = [1.0] * len(self.tasks) if task_weights is None else list(task_weights)
        self._world = world
        self._window = TaskWindows(tasks, MetricWindow)
        self._loss_term_sums: dict[str, float] = {}
        """Sums over samples since the line before of what the model adds to the loss, by name, and of their weights."""
        self._loss_terms_weight = 0.0
        self._pending: tuple[AsyncHostCopy, Batch, LossAgreement | None] | None = None
        # Rank 0 alone knows the run so far, as the others know of the line before: the sums are of whole numbers.
        self._lifetime = TaskWindows(tasks, LifetimeWindow)
        self._row_traffic: dict[str, RowTraffic] = {}
        """Up to the line before."""

    def add(self, logits: Tensor, batch: Batch, agreement: LossAgreement | None = None) -> None:
        """Add a step: this rank's logits [B] or [B, T], its slice of the batch, and what all ranks have agreed on, with
        the terms of the loss that the model names."""
        self._process_pending()
        self._pending = AsyncHostCopy(logits[: batch.batch_size - batch.num_padding]), batch, agreement
        if logits.device.type == "cpu":
            self._process_pending()

    def _process_pending(self) -> None:
        """Take in the step before, whose predictions have come from the device meanwhile."""
        unread, self._pending = self._pending, None
        if unread is None:
            return
        logits, batch, agreement = unread
        if agreement is not None and agreement.term_names:
            weight_of_all = agreement.global_totals.weight
            for name, mean in agreement.terms.items():
                self._loss_term_sums[name] = self._loss_term_sums.get(name, 0.0) + mean * weight_of_all
            self._loss_terms_weight += weight_of_all
        num_real = batch.batch_size - batch.num_padding
        weight, known = (
            None if column is None else column[:num_real].numpy() for column in (batch.weight, batch.label_mask)
        )
        self._window.add(logits.read().numpy(), batch.label[:num_real].numpy(), weight, label_mask=known)

    def pop_metrics(self) -> dict[str, Any]:
        """The figures of a line, plain data for JSON; the next line begins. Collective, the same on every rank.

        "ne", "auc" and, where it is not the loss, "logloss" are the first task's, "lifetime" holds what is known over
        the whole run, and "tasks" each task's own where there are several.
        """
        self._process_pending()
        window = gather_windows(self._window, self._world)
        self._window.reset()
        metrics = {task: window[task].compute() for task in self.tasks}
        so_far: dict[str, dict[str, Any]] = {}
        if self._world.rank == 0:
            for task, columns in window.get_state().items():
                self._lifetime[task].add(columns["logits"], columns["labels"], columns.get("weights"))
            so_far = {task: _select_lifetime_metrics(self._lifetime[task].compute()) for task in self.tasks}
        [(so_far, terms), *_] = self._world.all_gather_object((so_far, self._pop_loss_terms()))
        by_task = {task: {**_select_metrics(metrics[task]), "lifetime": so_far[task]} for task in self.tasks}
        losses = [metrics[task].to_dict()["logloss"] for task in self.tasks]
        total = None if None in losses else float(np.dot(self._task_weights, losses))
        first = by_task[self.tasks[0]]
        if len(self.tasks) > 1:
            return {"loss": total, **terms, **first, "tasks": by_task}
        return {"loss": total, **terms, **{name: value for name, value in first.items() if name != "logloss"}}

    def _pop_loss_terms(self) -> dict[str, Any]:
        """Means of the terms of the loss, by name; nothing where there are none. Where a run was resumed, rank 0 alone
        knows of what was before."""
        means = {name: one / (self._loss_terms_weight or 1.0) for name, one in self._loss_term_sums.items()}
        self._loss_term_sums, self._loss_terms_weight = {}, 0.0
        return {"loss_terms": means} if means else {}

    def pop_row_traffic(self, embeddings: BaseEmbeddingCollection[Any], num_steps: int) -> dict[str, Any]:
        """Of tables whose rows lie far, per step since the line before, over all ranks; nothing where there are none.
        Collective, the same on every rank."""
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
        """What a checkpoint keeps, `window.<task>.<column>` and `lifetime.<task>.<column>`; on rank 0, of all ranks.

        Collective. The window is sorted: its figures do not depend on the order of samples, and a run that was resumed
        in the middle of a window holds them in another order than one that was not.
        """
        self._process_pending()
        window = gather_windows(self._window, self._world).get_state()
        kept = {"window": {task: _sort_samples(state) for task, state in window.items()}, "lifetime": {}}
        if self._world.rank == 0:
            kept["lifetime"] = self._lifetime.get_state()
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
        """Undo `tensors`; every rank may call it, and rank 0 keeps what there is."""
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


def _float64_tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _select_metrics(metrics: Metrics) -> dict[str, Any]:
    figures = metrics.to_dict()
    return {name: figures[name] for name in ("logloss", "ne", "auc")}


def _select_lifetime_metrics(metrics: LifetimeMetrics) -> dict[str, Any]:
    figures = metrics.to_dict()
    return {name: figures[name] for name in ("logloss", "ne", "auc_binned", "auc_error_bound", "calibration")}


def _sort_samples(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    order = np.lexsort(tuple(reversed(list(state.values()))))
    return {name: column[order] for name, column in state.items()}
