"""One window per task, and figures by segment of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import Metrics
from meseta.train.metrics.lifetime import LifetimeWindow
from meseta.train.metrics.window import MetricWindow

WindowT = TypeVar("WindowT", MetricWindow, LifetimeWindow)


class TaskWindows(Generic[WindowT]):
    """A window for each task of a model, filled from the same batches."""

    def __init__(self, tasks: Sequence[str], kind: Callable[[], WindowT]) -> None:
        """Empty windows for `tasks`, the labels of the dataset; `kind` is MetricWindow or LifetimeWindow."""
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
        """Add a batch of logits and labels, [B] for one task or [B, T] for T, and the window's other columns [B].

        A sample counts for a task if its label is `label_mask`, of the shape of `labels`; None: all are known. It then
        has weight 0, so that the samples of all tasks are the same.

        Raises MesetaError where the shapes differ from each other or from the number of tasks.
        """
        scores, truth = np.asarray(logits), np.asarray(labels)
        num_tasks = len(self.tasks)
        wanted = [len(scores)] if num_tasks == 1 else [len(scores), num_tasks]
        for name, array in (("logits", scores), ("labels", truth)):
            if list(array.shape) != wanted:
                raise MesetaError(
                    f"metrics: {name} of shape {list(array.shape)}, but for {num_tasks} tasks they must be {wanted}; "
                    "the model has another number of outputs than the dataset has labels"
                )
        for place, task in enumerate(self.tasks):
            own = (scores, truth) if num_tasks == 1 else (scores[:, place], truth[:, place])
            own_weights = weights
            if label_mask is not None:
                is_known = np.asarray(label_mask).reshape(len(scores), -1)[:, place]
                given = np.ones(len(scores), np.float32) if weights is None else np.asarray(weights)
                own_weights = np.where(is_known, given, given.dtype.type(0))
            self._windows[task].add(*own, own_weights, *columns)

    def reset(self) -> None:
        """Forget all samples."""
        for window in self._windows.values():
            window.reset()

    def get_state(self) -> dict[str, dict[str, NDArray[Any]]]:
        """The state of each window by its task."""
        return {task: window.get_state() for task, window in self._windows.items()}

    def set_state(self, state: Mapping[str, Mapping[str, ArrayLike]]) -> None:
        """Replace all samples by those of `get_state`. Raises MesetaError where a task is missing."""
        for task, window in self._windows.items():
            if task not in state:
                raise MesetaError(f"metrics: there is no window of task {task!r}; it was saved for {sorted(state)}")
            window.set_state(state[task])

    def merge(self, states: Sequence[Mapping[str, Mapping[str, ArrayLike]]]) -> TaskWindows[WindowT]:
        """Windows of the same tasks with the samples of several states, such as those of all ranks."""
        together = TaskWindows[WindowT](self.tasks, type(self._windows[self.tasks[0]]))
        for task, window in self._windows.items():
            together._windows[task] = window.merge([state[task] for state in states])
        return together


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Figures over the samples that share a value."""

    value: int | None
    """The id of the feature's row; None for all values that are not listed."""
    metrics: dict[str, Metrics]
    """By task."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures of the first task, and those of all where there are several."""
        return {"value": self.value, **task_metrics(self.metrics, ("reliability",))}


def segment_metrics(windows: TaskWindows[MetricWindow], keys: NDArray[np.int64], max_segments: int) -> list[Segment]:
    """Figures of the samples in `windows` by their keys [n], which come in the order of adding.

    The `max_segments` keys with most samples, first those with more, then those of smaller value; last all others
    together. Raises MesetaError as `MetricWindow.compute` does.
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
    figures = {}
    for task, columns in state.items():
        window = MetricWindow()
        window.add(**{name: column[samples] for name, column in columns.items()})
        figures[task] = window.compute()
    return figures


def task_metrics(metrics: Mapping[str, Metrics], without: Sequence[str] = ()) -> dict[str, Any]:
    """Plain data for JSON: the figures of the first task, and under "tasks" those of each where there are several."""
    figures = [{name: value for name, value in m.to_dict().items() if name not in without} for m in metrics.values()]
    return figures[0] | ({"tasks": dict(zip(metrics, figures, strict=True))} if len(figures) > 1 else {})
