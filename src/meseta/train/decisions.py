"""When a run is evaluated and what that decides: the best weights, when training ends, how far rates have fallen.
Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from meseta.config import RunConfig, ScheduleConfig, TrainConfig
from meseta.telemetry.lines import EvalLine
from meseta.telemetry.splits import choosing_split
from meseta.train.stopping import BestSoFar


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


def chosen_by_evaluations(config: RunConfig) -> list[str]:
    """What evaluations on the way decide in a run, in words; their figures of the split that decides are flattered."""
    chosen = {
        "early stopping": config.train.early_stopping.patience is not None,
        "the best weights": config.keeps_best and config.train.evaluates_on_the_way,
        "the rates": "plateau" in (config.embedding_schedule.kind, config.dense_schedule.kind),
    }
    return [name for name, is_chosen in chosen.items() if is_chosen]


class Plateau:
    """How often one rate has fallen, since so many evaluations in a row gained nothing."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.num_falls = 0
        self._num_stale = 0
        self._schedule = schedule

    def update(self, step: int, *, gained: bool) -> None:
        """Take in an evaluation after `step` steps; those in the warm-up, or before the decay begins, do not count."""
        schedule = self._schedule
        if schedule.kind != "plateau" or step < max(schedule.warmup_steps, schedule.decay_start_step):
            return
        self._num_stale = 0 if gained else self._num_stale + 1
        if self._num_stale >= schedule.plateau_patience:
            self._num_stale, self.num_falls = 0, self.num_falls + 1

    def get_state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"num_falls": self.num_falls, "num_stale": self._num_stale}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Undo `get_state`."""
        self.num_falls, self._num_stale = state.get("num_falls", 0), state.get("num_stale", 0)


class Decisions:
    """Fed with every evaluation of a run, and a function of them alone: a run that is cut off and goes on decides as
    one that never was."""

    def __init__(self, config: RunConfig, splits: Collection[str]) -> None:
        self.split = choosing_split(splits)
        """The one whose evaluations count."""
        self.best = BestSoFar(config.train.early_stopping, self.split)
        self._plateaus = {"embedding": Plateau(config.embedding_schedule), "dense": Plateau(config.dense_schedule)}
        self._evaluated = 0
        """Step of the newest evaluation that was taken in."""

    @property
    def num_falls(self) -> tuple[int, int]:
        """Of the rates of tables and of the dense part."""
        return self._plateaus["embedding"].num_falls, self._plateaus["dense"].num_falls

    def update(self, line: EvalLine, *, on_the_way: bool) -> None:
        """Take in an evaluation, as metrics.jsonl has it; once, and only of the split that decides.

        One that is not `on_the_way`, made since a run ended there, may be the best, and counts for nothing else: a run
        that goes on from there has evaluations where one that never ended has them.
        """
        if line.split != self.split or line.step <= self._evaluated:
            return
        self._evaluated = line.step
        gained = self.best.update(line, counts=on_the_way)
        for plateau in self._plateaus.values() if on_the_way else ():
            plateau.update(line.step, gained=gained)

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        plateaus = {name: plateau.get_state() for name, plateau in self._plateaus.items()}
        return {"best": self.best.get_state(), "evaluated": self._evaluated, "plateaus": plateaus}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Undo `get_state`; `state` has the `step` of the checkpoint too, which is all that older versions kept."""
        self.best.set_state(state.get("best") or {})
        self._evaluated = state.get("evaluated", state["step"])
        for name, plateau in self._plateaus.items():
            plateau.set_state(state.get("plateaus", {}).get(name, {}))
