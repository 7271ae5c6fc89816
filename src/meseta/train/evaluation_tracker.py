"""When a run is evaluated and what that decides: the best weights, when training ends, how far rates have fallen.
Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from meseta.config import RunConfig, ScheduleConfig, TrainConfig
from meseta.telemetry.metrics_file import EvalLine
from meseta.telemetry.splits import validation_split
from meseta.train.early_stopping import EarlyStopping


def is_evaluation_due(config: TrainConfig, step: int, num_read: int, num_batches: int) -> bool:
    """Whether the config asks for an evaluation after `step` steps and `num_read` batches, `num_batches` an epoch.

    By epochs, after the first step that completes another `eval_every_epochs` of the training split.
    """
    if config.eval_every_steps is not None:
        return step % config.eval_every_steps == 0
    if config.eval_every_epochs is None or num_batches == 0:
        return False
    batches = Fraction(str(config.eval_every_epochs)) * num_batches  # as it was written: 0.1 is a tenth
    return num_read // batches > (num_read - 1) // batches


def decisions_from_evaluations(config: RunConfig) -> list[str]:
    """What evaluations on the way decide in a run, in words; their figures of the split that decides are flattered."""
    chosen = {
        "early stopping": config.train.early_stopping.patience is not None,
        "the best weights": config.keeps_best and config.train.evaluates_during_training,
        "the rates": "plateau" in (config.embedding_schedule.kind, config.dense_schedule.kind),
    }
    return [name for name, is_chosen in chosen.items() if is_chosen]


class PlateauTracker:
    """How often one rate has fallen, since so many evaluations in a row gained nothing."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.num_reductions = 0
        self._num_without_improvement = 0
        self._schedule = schedule

    def update(self, step: int, *, improved: bool) -> None:
        """Take in an evaluation after `step` steps; those in the warm-up, or before the decay begins, do not count."""
        schedule = self._schedule
        if schedule.kind != "plateau" or step < max(schedule.warmup_steps, schedule.decay_start_step):
            return
        self._num_without_improvement = 0 if improved else self._num_without_improvement + 1
        if self._num_without_improvement >= schedule.plateau_patience:
            self._num_without_improvement, self.num_reductions = 0, self.num_reductions + 1

    def get_state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"num_falls": self.num_reductions, "num_stale": self._num_without_improvement}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Undo `get_state`."""
        self.num_reductions, self._num_without_improvement = state.get("num_falls", 0), state.get("num_stale", 0)


class EvaluationTracker:
    """Fed with every evaluation of a run, and a function of them alone: a run that is cut off and goes on decides as
    one that never was."""

    def __init__(self, config: RunConfig, splits: Collection[str]) -> None:
        self.split = validation_split(splits)
        """The one whose evaluations count."""
        self.early_stopping = EarlyStopping(config.train.early_stopping, self.split)
        self._plateaus = {
            "embedding": PlateauTracker(config.embedding_schedule),
            "dense": PlateauTracker(config.dense_schedule),
        }
        self._last_evaluated_step = 0
        """Step of the newest evaluation that was taken in."""

    @property
    def num_reductions(self) -> tuple[int, int]:
        """Of the rates of tables and of the dense part."""
        return self._plateaus["embedding"].num_reductions, self._plateaus["dense"].num_reductions

    def update(self, line: EvalLine, *, scheduled: bool) -> None:
        """Take in an evaluation, as metrics.jsonl has it; once, and only of the split that decides.

        One that is not `scheduled`, made since a run ended there, may be the best, and counts for nothing else: a run
        that goes on from there has evaluations where one that never ended has them.
        """
        if line.split != self.split or line.step <= self._last_evaluated_step:
            return
        self._last_evaluated_step = line.step
        gained = self.early_stopping.update(line, count_patience=scheduled)
        for plateau in self._plateaus.values() if scheduled else ():
            plateau.update(line.step, improved=gained)

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        plateaus = {name: plateau.get_state() for name, plateau in self._plateaus.items()}
        return {"best": self.early_stopping.get_state(), "evaluated": self._last_evaluated_step, "plateaus": plateaus}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Undo `get_state`; `state` has the `step` of the checkpoint too, which is all that older versions kept."""
        self.early_stopping.set_state(state.get("best") or {})
        self._last_evaluated_step = state.get("evaluated", state["step"])
        for name, plateau in self._plateaus.items():
            plateau.set_state(state.get("plateaus", {}).get(name, {}))
