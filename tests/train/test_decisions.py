"""Decisions that follow from evaluations, against explicit rules."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meseta.config import RunConfig, ScheduleConfig, TrainConfig, validate_document
from meseta.spec import MesetaError
from meseta.telemetry.metrics import selection_on_test_warning, validation_split
from meseta.telemetry.metrics_file import EvalLine
from meseta.train.evaluation_tracker import (
    EvaluationTracker,
    PlateauTracker,
    decisions_from_evaluations,
    is_evaluation_due,
)


def config(**train: Any) -> RunConfig:
    schedule = train.pop("schedule", {})
    return validate_document({"run_dir": "r", "data": {"dir": "d"}, "train": train, "schedule": schedule})


def line(step: int, ne: float, split: str = "test") -> EvalLine:
    return EvalLine(step=step, split=split, ne=ne)


def test_the_validation_split_decides_if_present() -> None:
    assert [validation_split(names) for names in (["train", "test"], ["train", "valid", "test"])] == ["test", "valid"]
    decisions = EvaluationTracker(config(), ["train", "valid", "test"])
    decisions.update(line(3, 0.1), scheduled=True)
    assert decisions.early_stopping.best_step is None
    decisions.update(line(3, 0.9, "valid"), scheduled=True)
    assert (decisions.early_stopping.best_step, decisions.early_stopping.best_value) == (3, 0.9)
    assert decisions.get_state()["best"]["split"] == "valid"
    of_test = EvaluationTracker(config(), ["train", "test"])
    of_test.set_state({**decisions.get_state(), "step": 3})
    assert of_test.early_stopping.best_step is None  # the best on valid does not count for test


@pytest.mark.parametrize(
    ("every", "num_batches", "due"),
    [
        (1.0, 7, [7, 14, 21]),
        (2.0, 7, [14]),
        (0.5, 7, [4, 7, 11, 14, 18, 21]),
        (0.1, 10, [*range(1, 31)]),
        (0.3, 10, [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        (0.01, 5, [*range(1, 16)]),
        (1.5, 4, [6, 12]),
    ],
)
def test_evaluations_by_epochs(every: float, num_batches: int, due: list[int]) -> None:
    """An evaluation is due after the first step at which k * every epochs are complete, for k = 1, 2, ..."""
    steps = []
    for step in range(1, 3 * num_batches + 1):
        epoch, batch = divmod(step, num_batches)
        num_read = epoch * num_batches + batch
        if is_evaluation_due(TrainConfig(eval_every_epochs=every), step, num_read, num_batches):
            steps.append(step)
    assert steps == due


def test_evaluations_by_steps_or_none() -> None:
    for every, due in ((None, []), (3, [3, 6, 9])):
        steps = [n for n in range(1, 11) if is_evaluation_due(TrainConfig(eval_every_steps=every), n, 0, 9)]
        assert steps == due


@pytest.mark.parametrize(
    ("changes", "gains", "falls"),
    [
        ({}, "100000", [0, 0, 1, 1, 2, 2]),
        ({}, "101010", [0, 0, 0, 0, 0, 0]),
        ({"plateau_patience": 1}, "100010", [0, 1, 2, 3, 3, 4]),
        ({"plateau_patience": 3}, "0001000", [0, 0, 1, 1, 1, 1, 2]),
        ({"warmup_steps": 30}, "000000", [0, 0, 0, 1, 1, 2]),
        ({"decay_start_step": 31}, "000000", [0, 0, 0, 0, 1, 1]),
        ({"kind": "step", "step_every": 3}, "000000", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_plateau_lets_the_rate_fall(changes: dict[str, Any], gains: str, falls: list[int]) -> None:
    schedule = ScheduleConfig(**{"kind": "plateau", **changes})
    plateau, reductions = PlateauTracker(schedule), []
    for k, gained in enumerate(gains, start=1):
        plateau.update(10 * k, improved=gained == "1")
        reductions.append(plateau.num_reductions)
        again = PlateauTracker(schedule)  # like a run that is interrupted here and resumed
        again.set_state(plateau.get_state())
        plateau = again
    assert reductions == falls


def test_an_evaluation_counts_once_and_an_unscheduled_one_can_only_be_the_best() -> None:
    decisions = EvaluationTracker(
        config(eval_every_steps=2, early_stopping={"patience": 2}, schedule={"kind": "plateau", "plateau_patience": 1}),
        ["train", "test"],
    )
    for step, ne in ((2, 0.9), (4, 0.95), (4, 0.95)):
        decisions.update(line(step, ne), scheduled=True)
    assert (decisions.early_stopping.num_without_improvement, decisions.num_reductions) == (1, (1, 1))
    decisions.update(line(5, 0.97), scheduled=False)
    assert (
        decisions.early_stopping.num_without_improvement,
        decisions.num_reductions,
        decisions.early_stopping.best_step,
    ) == (1, (1, 1), 2)
    decisions.update(line(7, 0.8), scheduled=False)
    assert (
        decisions.early_stopping.num_without_improvement,
        decisions.num_reductions,
        decisions.early_stopping.best_step,
    ) == (0, (1, 1), 7)
    again = EvaluationTracker(config(eval_every_steps=2, schedule={"kind": "plateau", "plateau_patience": 1}), ["test"])
    again.set_state({**decisions.get_state(), "step": 7})
    assert again.get_state() == decisions.get_state()
    again.update(line(7, 0.1), scheduled=True)
    assert again.get_state() == decisions.get_state()


def test_checkpoints_of_older_versions_include_their_evaluations() -> None:
    """Older versions stored only the best evaluation. It includes all evaluations up to the checkpoint."""
    decisions = EvaluationTracker(config(), ["test"])
    decisions.set_state({"step": 9, "best": {"metric": "ne", "step": 4, "value": 0.8, "num_stale": 1}})
    decisions.update(line(9, 0.1), scheduled=True)
    assert (
        decisions.early_stopping.best_step,
        decisions.early_stopping.num_without_improvement,
        decisions.num_reductions,
    ) == (4, 1, (0, 0))
    decisions.set_state({"step": 9})
    assert decisions.early_stopping.best_step == 4


def test_selection_on_the_test_split_is_reported() -> None:
    plain = config(eval_every_steps=5)
    assert decisions_from_evaluations(plain) == [] and selection_on_test_warning("test", []) == ""
    everything = config(eval_every_steps=5, finish="best", early_stopping={"patience": 1}, schedule={"kind": "plateau"})
    chosen = decisions_from_evaluations(everything)
    assert chosen == ["early stopping", "the best weights", "the rates"]
    assert selection_on_test_warning("valid", chosen) == ""
    assert "the test split decided early stopping and the best weights" in selection_on_test_warning("test", chosen[:2])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"train": {"finish": "best"}}, "finish 'best' needs evaluations during training"),
        ({"schedule": {"kind": "plateau"}}, "schedule.kind 'plateau' needs evaluations during training"),
        ({"dense": {"schedule": {"kind": "plateau"}}}, "schedule.kind 'plateau' needs evaluations during training"),
        ({"train": {"eval_every_steps": 2, "eval_every_epochs": 1}}, "cannot be combined; leave one out"),
        ({"train": {"eval_every_epochs": 0}}, "greater than 0"),
        ({"train": {"eval_every_epochs": math.inf}}, "finite"),
    ],
)
def test_configs_that_do_not_fit(document: dict[str, Any], words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        validate_document({"run_dir": "r", "data": {"dir": "d"}, **document})
    assert words in str(caught.value)


def test_a_schedule_for_all_and_one_for_a_part() -> None:
    """The schedule of a part replaces all keys of the common one, and the stored config keeps both."""
    common, of_part = {"kind": "cosine", "warmup_steps": 9}, {"kind": "constant"}
    for part, other in (("embedding", "dense"), ("dense", "embedding")):
        got = validate_document({"run_dir": "r", "data": {"dir": "d"}, "schedule": common, part: {"schedule": of_part}})
        schedules = {"embedding": got.embedding_schedule, "dense": got.dense_schedule}
        assert schedules[other] == ScheduleConfig(kind="cosine", warmup_steps=9)
        assert schedules[part] == ScheduleConfig()
        written = got.model_dump(mode="json")
        assert written[other]["schedule"] is None and written["schedule"]["kind"] == "cosine"
        assert validate_document(written) == got
