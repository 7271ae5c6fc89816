"""The best evaluation so far, and when to stop because none has been better for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meseta.config import EarlyStoppingConfig
from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError, nearest
from meseta.telemetry.figures import RISING
from meseta.telemetry.lines import EvalLine

_GROUPED = {"gauc", "ndcg"}


def check_stopping(config: EarlyStoppingConfig, dataset: Dataset) -> None:
    """Raises MesetaError for a figure that no evaluation of the dataset has."""
    where = "config: train.early_stopping"
    if config.task is not None and config.task not in dataset.labels:
        raise MesetaError(f"{where}.task {config.task!r} is no label; {nearest(config.task, list(dataset.labels))}")
    if config.metric in _GROUPED and dataset.group is None:
        raise MesetaError(
            f"{where}.metric is {config.metric!r}, but the data have no groups; name their column when you prepare "
            "them, or choose 'ne', 'logloss', 'auc' or 'pr_auc'"
        )


class BestSoFar:
    """Fed with every evaluation; a function of them alone, so a resumed run stops where one never stopped does."""

    def __init__(self, config: EarlyStoppingConfig, split: str = "test") -> None:
        self.config = config
        self._split = split
        self.step: int | None = None
        """Step of the best evaluation; None before any that has a figure."""
        self.value: float | None = None
        """Its metric."""
        self.num_stale = 0
        """Evaluations since then."""

    def update(self, line: EvalLine, *, counts: bool = True) -> bool:
        """Take in an evaluation, as metrics.jsonl has it; returns whether it is the best so far.

        A figure that is not defined (one class only) is no better than any. Better by less than `min_delta` than the
        best counts as stale, where `counts` says so, and leaves the best where it is.
        """
        # The figures of a single label stand in the line itself.
        figures = line.tasks.get(self.config.task) if self.config.task and line.tasks else line
        value = None if figures is None else figures.figure(self.config.metric)
        if value is not None and math.isfinite(value) and self._is_better(value):
            self.step, self.value, self.num_stale = line.step, value, 0
            return True
        self.num_stale += counts
        return False

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        gain = value - self.value if self.config.metric in RISING else self.value - value
        return gain > self.config.min_delta

    @property
    def ends_training(self) -> bool:
        """Whether `patience` evaluations in a row were no better."""
        return self.config.patience is not None and self.num_stale >= self.config.patience

    def __str__(self) -> str:
        stale = f"{self.num_stale} evaluations in a row were no better"
        return stale if self.step is None else f"{stale} than {self.told}"

    @property
    def told(self) -> str:
        """The best evaluation in words."""
        return f"{self.config.metric} {self.value:.6g} at step {self.step}"

    @property
    def _figure(self) -> dict[str, str]:
        task, split = self.config.task, self._split
        return {
            "metric": self.config.metric,
            **({} if task is None else {"task": task}),
            **({} if split == "test" else {"split": split}),
        }

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._figure, "step": self.step, "value": self.value, "num_stale": self.num_stale}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Undo `get_state`; what was kept of another metric, or on another split, says nothing of this one, and is
        left."""
        if {name: state[name] for name in ("metric", "task", "split") if name in state} == self._figure:
            self.step, self.value, self.num_stale = state["step"], state["value"], state["num_stale"]
