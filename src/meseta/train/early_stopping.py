"""Early stopping: the best evaluation so far, and when to stop because none was better for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meseta.config import EarlyStoppingConfig
from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError, suggest
from meseta.telemetry.metrics import HIGHER_IS_BETTER
from meseta.telemetry.metrics_file import EvalLine

_GROUPED_METRICS = {"gauc", "ndcg"}


def check_early_stopping(config: EarlyStoppingConfig, dataset: Dataset) -> None:
    """Raise MesetaError if evaluations of the dataset do not have the configured metric or label."""
    where = "config: train.early_stopping"
    if config.task is not None and config.task not in dataset.labels:
        raise MesetaError(f"{where}.task {config.task!r} is not a label; {suggest(config.task, list(dataset.labels))}")
    if config.metric in _GROUPED_METRICS and dataset.group is None:
        raise MesetaError(
            f"{where}.metric is {config.metric!r}, but the data has no groups; set a group column when preparing "
            "the data, or choose 'ne', 'logloss', 'auc' or 'pr_auc'"
        )


class EarlyStopping:
    """Early stopping over the evaluations of a run. It depends on the evaluations only, so a resumed run stops
    identically."""

    def __init__(self, config: EarlyStoppingConfig, split: str = "test") -> None:
        self.config = config
        self._split = split
        self.best_step: int | None = None
        """Step of the best evaluation. `None` before the first evaluation with a defined metric."""
        self.best_value: float | None = None
        """Metric of the best evaluation."""
        self.num_without_improvement = 0
        """Number of evaluations since the best one."""

    def update(self, line: EvalLine, *, count_patience: bool = True) -> bool:
        """Process an evaluation. Return whether it is the best so far.

        An evaluation is better only if its metric is defined and improves by more than `min_delta`. Without
        `count_patience`, an evaluation that is not better has no effect.
        """
        # Metrics of a single label are in the line itself.
        metrics = line.tasks.get(self.config.task) if self.config.task and line.tasks else line
        value = None if metrics is None else metrics.metric(self.config.metric)
        if value is not None and math.isfinite(value) and self._is_better(value):
            self.best_step, self.best_value, self.num_without_improvement = line.step, value, 0
            return True
        self.num_without_improvement += count_patience
        return False

    def _is_better(self, value: float) -> bool:
        if self.best_value is None:
            return True
        gain = value - self.best_value if self.config.metric in HIGHER_IS_BETTER else self.best_value - value
        return gain > self.config.min_delta

    @property
    def should_stop(self) -> bool:
        """Whether the last `patience` evaluations were not better."""
        return self.config.patience is not None and self.num_without_improvement >= self.config.patience

    def __str__(self) -> str:
        stale = f"{self.num_without_improvement} evaluations in a row were no better"
        return stale if self.best_step is None else f"{stale} than {self.best_text}"

    @property
    def best_text(self) -> str:
        """Description of the best evaluation for messages."""
        return f"{self.config.metric} {self.best_value:.6g} at step {self.best_step}"

    @property
    def _metric_state(self) -> dict[str, str]:
        task, split = self.config.task, self._split
        return {
            "metric": self.config.metric,
            **({} if task is None else {"task": task}),
            **({} if split == "test" else {"split": split}),
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            **self._metric_state,
            "step": self.best_step,
            "value": self.best_value,
            "num_stale": self.num_without_improvement,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`. A state of another metric, label or split is ignored."""
        if {name: state[name] for name in ("metric", "task", "split") if name in state} == self._metric_state:
            self.best_step, self.best_value, self.num_without_improvement = (
                state["step"],
                state["value"],
                state["num_stale"],
            )
