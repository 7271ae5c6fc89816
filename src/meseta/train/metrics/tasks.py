"""Metric windows of several tasks, and metrics by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import Metrics
from meseta.train.metrics.lifetime import LifetimeWindow, MetricWindow

WindowT = TypeVar("WindowT", MetricWindow, LifetimeWindow)


class TaskWindows(Generic[WindowT]):
    """Metric windows of the tasks of a model, filled from the same batches."""

    def __init__(self, tasks: Sequence[str], kind: Callable[[], WindowT]) -> None:
        """Create an empty window of class `kind` for each task. `tasks` are the labels of the dataset."""
        self.tasks = tuple(tasks)
        self._windows: dict[str, WindowT] = {task: kind() for task in self.tasks}

    def __getitem__(self, task: str) -> WindowT:
        return self._windows[task]

    def add(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *columns: ArrayLike | None,
        label_mask: ArrayLike | None = None,
    ) -> None:
        """Add a batch of logits and labels, [B] for one task or [B, T] for several, and other columns [B].

        `label_mask` has the shape of `labels` and marks known labels. `None` means that all labels are known.
        Raises MesetaError if the shapes differ or do not match the number of tasks.
        """
        scores, truth = np.asarray(logits), np.asarray(labels)
        num_tasks = len(self.tasks)
        expected_shape = [len(scores)] if num_tasks == 1 else [len(scores), num_tasks]
        for name, array in (("logits", scores), ("labels", truth)):
            if list(array.shape) != expected_shape:
                raise MesetaError(
                    f"metrics: {name} must have shape {expected_shape} for {num_tasks} tasks, got {list(array.shape)}; "
                    "use a model with one output per label of the dataset"
                )
        for place, task in enumerate(self.tasks):
            task_columns = (scores, truth) if num_tasks == 1 else (scores[:, place], truth[:, place])
            task_weights = weights
            if label_mask is not None:
                is_known = np.asarray(label_mask).reshape(len(scores), -1)[:, place]
                all_weights = np.ones(len(scores), np.float32) if weights is None else np.asarray(weights)
                # Weight 0 removes a sample of an unknown label, while the windows of all tasks keep the same length.
                task_weights = np.where(is_known, all_weights, all_weights.dtype.type(0))
            self._windows[task].add(*task_columns, task_weights, *columns)

    def reset(self) -> None:
        """Remove all samples."""
        for window in self._windows.values():
            window.reset()

    def get_state(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the state of each window by task."""
        return {task: window.get_state() for task, window in self._windows.items()}

    def set_state(self, state: Mapping[str, Mapping[str, ArrayLike]]) -> None:
        """Replace all samples by a state of `get_state`. Raises MesetaError if a task is missing."""
        for task, window in self._windows.items():
            if task not in state:
                raise MesetaError(f"metrics: the saved state has no window of task {task!r}, only {sorted(state)}")
            window.set_state(state[task])

    def merge(self, states: Sequence[Mapping[str, Mapping[str, ArrayLike]]]) -> TaskWindows[WindowT]:
        """Return windows of the same tasks with the samples of several states, such as those of all ranks."""
        together = TaskWindows[WindowT](self.tasks, type(self._windows[self.tasks[0]]))
        for task, window in self._windows.items():
            together._windows[task] = window.merge([state[task] for state in states])
        return together


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Metrics of the samples with the same value of a feature."""

    value: int | None
    """Row id of the feature. `None` for all values without a segment."""
    metrics: dict[str, Metrics]
    """Metrics by task."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON, as `task_metrics` does. Reliability curves are omitted."""
        return {"value": self.value, **task_metrics(self.metrics, ("reliability",))}


def segment_metrics(windows: TaskWindows[MetricWindow], keys: NDArray[np.int64], max_segments: int) -> list[Segment]:
    """Compute metrics by segment of the samples in `windows`. `keys` [n] are in the order in which samples were added.

    The `max_segments` keys with the most samples come first, by (descending count, ascending key). The last segment has
    all other keys.
    Raises MesetaError under the conditions of `MetricWindow.compute`.
    """
    values, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    chosen = np.lexsort((values, -counts))[:max_segments]
    return list(_segment_metrics(windows, which, chosen, values))


def _segment_metrics(
    windows: TaskWindows[MetricWindow], which: NDArray[np.intp], chosen: NDArray[np.intp], values: NDArray[np.int64]
) -> Iterator[Segment]:
    state = windows.get_state()
    rest = np.ones(len(which), np.bool_)
    for place in chosen.tolist():
        samples = which == place
        rest &= ~samples
        yield Segment(value=int(values[place]), metrics=_compute_per_task(state, samples))
    if rest.any():
        yield Segment(value=None, metrics=_compute_per_task(state, rest))


def _compute_per_task(
    state: Mapping[str, Mapping[str, NDArray[Any]]], samples: NDArray[np.bool_]
) -> dict[str, Metrics]:
    metrics = {}
    for task, columns in state.items():
        window = MetricWindow()
        window.add(**{name: column[samples] for name, column in columns.items()})
        metrics[task] = window.compute()
    return metrics


def task_metrics(metrics: Mapping[str, Metrics], without: Sequence[str] = ()) -> dict[str, Any]:
    """Convert metrics by task to plain data for JSON, without the keys in `without`.

    The result has the metrics of the first task. If there are several tasks, the key "tasks" has the metrics of each.
    """
    documents = [{name: value for name, value in m.to_dict().items() if name not in without} for m in metrics.values()]
    return documents[0] | ({"tasks": dict(zip(metrics, documents, strict=True))} if len(documents) > 1 else {})
