"""Early stopping: the best evaluation so far, and when to stop because none was better for a while."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from meseta.config import EarlyStoppingConfig, RunConfig, ScheduleConfig, TrainConfig
from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError, suggest
from meseta.telemetry.metrics import HIGHER_IS_BETTER, TEST, validation_split
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
    """Early stopping over the evaluations of a run, which alone determine it. A resumed run stops identically."""

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


# Imports no torch.


def is_evaluation_due(config: TrainConfig, step: int, num_read: int, num_batches: int) -> bool:
    """Whether to evaluate after `step` steps.

    With `eval_every_epochs`, an evaluation is due after the first step that completes another multiple of it.
    `num_read` batches have been trained, and an epoch has `num_batches`.
    """
    if config.eval_every_steps is not None:
        return step % config.eval_every_steps == 0
    if config.eval_every_epochs is None or num_batches == 0:
        return False
    batches = Fraction(str(config.eval_every_epochs)) * num_batches  # Exact decimal: 0.1 is a tenth.
    return num_read // batches > (num_read - 1) // batches


def decisions_from_evaluations(config: RunConfig) -> list[str]:
    """List the decisions of a run that depend on evaluations during training."""
    # Metrics of the split that decides are too optimistic, so reports name these decisions.
    chosen = {
        "early stopping": config.train.early_stopping.patience is not None,
        "the best weights": config.keeps_best and config.train.evaluates_during_training,
        "the rates": "plateau" in (config.embedding_schedule.kind, config.dense_schedule.kind),
    }
    return [name for name, is_chosen in chosen.items() if is_chosen]


class PlateauTracker:
    """Counts the reductions of one learning rate. A reduction follows a number of evaluations without improvement."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.num_reductions = 0
        self._num_without_improvement = 0
        self._schedule = schedule

    def update(self, step: int, *, improved: bool) -> None:
        """Process an evaluation after `step` steps. Ignores those during warm-up, or before the decay starts."""
        schedule = self._schedule
        if schedule.kind != "plateau" or step < max(schedule.warmup_steps, schedule.decay_start_step):
            return
        self._num_without_improvement = 0 if improved else self._num_without_improvement + 1
        if self._num_without_improvement >= schedule.plateau_patience:
            self._num_without_improvement, self.num_reductions = 0, self.num_reductions + 1

    def get_state(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"num_falls": self.num_reductions, "num_stale": self._num_without_improvement}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Restore a state of `get_state`."""
        self.num_reductions, self._num_without_improvement = state.get("num_falls", 0), state.get("num_stale", 0)


class EvaluationTracker:
    """Tracks all evaluations of a run, which alone determine decisions. A resumed run makes identical ones."""

    def __init__(self, config: RunConfig, splits: Collection[str]) -> None:
        self.split = validation_split(splits)
        """Split whose evaluations are tracked."""
        # A run that starts from another one may train on all rows.
        self._is_evaluated = self.split in splits or config.start_from is None or config.train.evaluates_during_training
        self.early_stopping = EarlyStopping(config.train.early_stopping, self.split)
        self._plateaus = {
            "embedding": PlateauTracker(config.embedding_schedule),
            "dense": PlateauTracker(config.dense_schedule),
        }
        # Step of the newest tracked evaluation.
        self._last_evaluated_step = 0

    def evaluated_splits(self, *, with_test: bool) -> list[str]:
        """Return the splits to evaluate at the end of a run."""
        if not self._is_evaluated:
            return []
        return list(dict.fromkeys([self.split, *([TEST] if with_test else [])]))

    @property
    def num_reductions(self) -> tuple[int, int]:
        """Number of reductions of the rates of (tables, dense part)."""
        return self._plateaus["embedding"].num_reductions, self._plateaus["dense"].num_reductions

    def update(self, line: EvalLine, *, scheduled: bool) -> None:
        """Process an evaluation of metrics.jsonl. Other splits and repeated evaluations are ignored.

        `scheduled` is false for an evaluation that was made only because a run ended. It may be the best, but does not
        count as one without improvement.
        """
        if line.split != self.split or line.step <= self._last_evaluated_step:
            return
        self._last_evaluated_step = line.step
        # A run that is resumed from there must decide as if it had never ended.
        improved = self.early_stopping.update(line, count_patience=scheduled)
        for plateau in self._plateaus.values() if scheduled else ():
            plateau.update(line.step, improved=improved)

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        plateaus = {name: plateau.get_state() for name, plateau in self._plateaus.items()}
        return {"best": self.early_stopping.get_state(), "evaluated": self._last_evaluated_step, "plateaus": plateaus}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`. Older versions stored only the `step` of the checkpoint."""
        self.early_stopping.set_state(state.get("best") or {})
        self._last_evaluated_step = state.get("evaluated", state["step"])
        for name, plateau in self._plateaus.items():
            plateau.set_state(state.get("plateaus", {}).get(name, {}))
