"""Metrics of groups of samples in bounded memory, with a binned AUC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.telemetry.continued import EpochMetricsRecord
from meseta.train.daily.sample_groups import (
    NO_HOUR,
    HourIndex,
    TaskGroups,
    hour_of_day,
    is_by_day,
    make_record,
    split_codes,
)
from meseta.train.metrics import LifetimeWindow

HOUR_BINS = 1 << 11
"""Number of bins of each hour. There are up to `MAX_HOURS` hours."""
_NEW_IDS, _HOUR, _DAY_HOUR = "new", "hour", "day"


class BinnedEpoch:
    """Metrics of samples by group. Integer sums make them independent of the order of samples, ranks and resumes.

    There are two windows of 1.8 MB and up to 168 windows of 0.2 MB for each task.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tuple(tasks)
        self._by_new: dict[str, tuple[LifetimeWindow, LifetimeWindow]] = {}
        # By task and hour. The hours are those of the day as soon as there are too many.
        self._by_hour: dict[str, dict[int, LifetimeWindow]] = {task: {} for task in tasks}
        self._by_day = False
        self.num_samples = 0
        """Number of samples, including those of weight 0."""

    def add(self, windows: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Add the samples of metric windows with group codes, by task."""
        for task, columns in windows.items():
            hours, is_new = split_codes(columns["groups"])
            distinct = np.unique(hours)
            self._limit_hours(distinct)
            by_new = self._new_windows(task)
            for window, samples in zip(by_new, (~is_new, is_new), strict=True):
                window.add(**_select(columns, samples))
            for hour in distinct.tolist():
                if hour != NO_HOUR:
                    self._hour_window(task, hour).add(**_select(columns, hours == hour))
        self.num_samples += len(windows[self._tasks[0]]["groups"])

    def compute(self) -> EpochMetricsRecord:
        """Return the metrics. Raises MesetaError if an added value was invalid."""
        return make_record({task: self._compute_task(task) for task in self._tasks})

    def _compute_task(self, task: str) -> TaskGroups:
        by_new = self._new_windows(task)
        total = LifetimeWindow.merge([window.get_state() for window in by_new])
        hours = np.array(sorted(self._by_hour[task]), np.int64)
        index = HourIndex(hours, self._by_day, hours)
        return TaskGroups(
            total=_describe(total),
            by_new=[_describe(window) for window in by_new],
            by_hour=index.name_hours([_describe(self._by_hour[task][hour]) for hour in hours.tolist()]),
        )

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays by name. It is empty without samples."""
        if not self.num_samples:
            return {}
        windows = {
            f"{task}.{kind}.{key}.{name}": column
            for task, kind, key, window in self._all_windows()
            for name, column in window.get_state().items()
        }
        return {"num_samples": np.array([self.num_samples]), **windows}

    def add_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the samples of a state of `get_state`."""
        parts: dict[tuple[str, str, int], dict[str, NDArray[Any]]] = {}
        for path, column in state.items():
            if path == "num_samples":
                self.num_samples += int(column[0])
            else:
                task, kind, key, name = path.rsplit(".", 3)
                parts.setdefault((task, kind, int(key)), {})[name] = column
        if any(kind == _DAY_HOUR for _, kind, _ in parts):
            self._merge_days()
        self._limit_hours(np.array([key for _, kind, key in parts if kind == _HOUR], np.int64))
        for (task, kind, number), columns in parts.items():
            window = self._new_windows(task)[number] if kind == _NEW_IDS else self._hour_window(task, number)
            window.add_state(columns)

    @staticmethod
    def merge(tasks: Sequence[str], states: Sequence[Mapping[str, NDArray[Any]]]) -> BinnedEpoch:
        """Return the metrics of the samples of several states, such as those of all ranks."""
        merged = BinnedEpoch(tasks)
        for state in states:
            merged.add_state(state)
        return merged

    def _all_windows(self) -> Iterator[tuple[str, str, int, LifetimeWindow]]:
        for task in self._tasks:
            yield from ((task, _NEW_IDS, key, window) for key, window in enumerate(self._new_windows(task)))
            kind, by_hour = _DAY_HOUR if self._by_day else _HOUR, self._by_hour[task]
            yield from ((task, kind, hour, by_hour[hour]) for hour in sorted(by_hour))

    def _new_windows(self, task: str) -> tuple[LifetimeWindow, LifetimeWindow]:
        if task not in self._by_new:
            self._by_new[task] = LifetimeWindow(), LifetimeWindow()
        return self._by_new[task]

    def _hour_window(self, task: str, hour: int) -> LifetimeWindow:
        if self._by_day:
            hour = int(hour_of_day(np.array(hour)))
        by_hour = self._by_hour[task]
        if hour not in by_hour:
            by_hour[hour] = LifetimeWindow(HOUR_BINS)
        return by_hour[hour]

    def _limit_hours(self, more: NDArray[np.int64]) -> None:
        """Merge the hours of all days if these and `more` are too many."""
        hours = {hour for by_hour in self._by_hour.values() for hour in by_hour}
        if not self._by_day and is_by_day(np.array(sorted(hours.union(more.tolist())), np.int64)):
            self._merge_days()

    def _merge_days(self) -> None:
        self._by_day = True
        before, self._by_hour = self._by_hour, {task: {} for task in self._tasks}
        for task, by_hour in before.items():
            for hour, window in by_hour.items():
                self._hour_window(task, hour).add_state(window.get_state())


def _select(columns: Mapping[str, NDArray[Any]], samples: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    return {name: column[samples] for name, column in columns.items() if name != "groups"}


def _describe(window: LifetimeWindow) -> dict[str, Any]:
    document = window.compute().to_dict()
    document["auc"] = document.pop("auc_binned")
    del document["reliability"]
    return document
