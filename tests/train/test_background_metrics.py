"""Metrics in a background thread: lines are the same as without it, in order, and none is lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meseta.comm import World
from meseta.data import Batch
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError
from meseta.system.background import BackgroundJobs
from meseta.train import background_metrics, trainer
from meseta.train.background_metrics import MAX_PENDING_JOBS, BackgroundMetrics
from meseta.train.run_dir import RunDir
from meseta.train.running_metrics import RunningMetrics
from meseta.train.saving import CheckpointManager
from small_run import final_checksum, metrics, settings, train, without_times

TIMEOUT_S = 60
FULL = "No space left on device"


def make_batch(
    label: np.ndarray, weight: np.ndarray | None = None, label_mask: np.ndarray | None = None, num_padding: int = 0
) -> Batch:
    return Batch(
        dense=torch.zeros(len(label), 3),
        sparse=KeyedJaggedTensor.from_lists({"item": [[1]] * len(label)}),
        label=torch.from_numpy(label),
        weight=None if weight is None else torch.from_numpy(weight),
        label_mask=None if label_mask is None else torch.from_numpy(label_mask),
        num_padding=num_padding,
    )


def make_metrics(tasks: tuple[str, ...] = ("click",)) -> BackgroundMetrics:
    return BackgroundMetrics(RunningMetrics(tasks, None, World.single()), World.single())


def add_steps(made: BackgroundMetrics, count: int) -> None:
    draw = np.random.default_rng(count)
    for _ in range(count):
        label = (draw.random(8) < 0.5).astype(np.float32)
        made.add(torch.from_numpy(draw.normal(size=8).astype(np.float32)), make_batch(label))


def write_line(made: BackgroundMetrics, write: Callable[[dict[str, Any]], object]) -> None:
    compute = made.start_line()
    made.write(lambda: write(compute()))


@pytest.mark.parametrize("handover", [1, 100, 10**9])
def test_lines_have_the_metrics_of_their_samples(handover: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, padding, and weights and unknown labels in some steps, against scikit-learn."""
    monkeypatch.setattr(background_metrics, "HANDOVER_SAMPLES", handover)
    draw, made, lines = np.random.default_rng(1), make_metrics(("click", "buy")), []
    kept: list[tuple[np.ndarray, ...]] = []
    starts = [0]
    for step in range(1, 24):
        size, padding = int(draw.integers(20, 70)), int(draw.integers(0, 6))
        scores = draw.normal(size=(size, 2)).round(1).astype(np.float32)
        label = (draw.random((size, 2)) < 0.4).astype(np.float32)
        weight, mask = np.ones(size, np.float32), np.ones((size, 2), np.bool_)
        if is_weighted := step % 3 > 0:
            weight = draw.choice([0.5, 1.0, 2.0], size).astype(np.float32)
        if is_masked := step % 4 > 1:
            mask = draw.random((size, 2)) < 0.8
        batch = make_batch(label, weight if is_weighted else None, mask if is_masked else None, padding)
        made.add(torch.from_numpy(scores.copy()), batch)
        kept.append(tuple(column[: size - padding] for column in (scores, label, weight, mask)))
        if step in (7, 8, 23):
            write_line(made, lines.append)
            starts.append(step)
    made.close()
    assert len(lines) == 3
    for line, first, last in zip(lines, starts, starts[1:], strict=False):
        for begin, of_line in ((first, True), (0, False)):
            scores, label, weight, mask = (np.concatenate(column) for column in zip(*kept[begin:last], strict=True))
            losses = []
            for place, task in enumerate(("click", "buy")):
                known, of_task = mask[:, place], line["tasks"][task]
                p = 1 / (1 + np.exp(-scores[known, place].astype(np.float64)))
                losses.append(log_loss(label[known, place], p, sample_weight=weight[known]))
                area = roc_auc_score(label[known, place], p, sample_weight=weight[known])
                loss, auc = of_task["logloss"], of_task["auc"]
                if not of_line:  # Scores are multiples of 0.1, so each bin has one.
                    loss, auc = of_task["lifetime"]["logloss"], of_task["lifetime"]["auc_binned"]
                assert (loss, auc) == pytest.approx((losses[-1], area), abs=1e-9)
            if of_line:
                assert line["loss"] == pytest.approx(sum(losses), abs=1e-9)


def test_lines_are_written_in_order_by_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_metrics, "HANDOVER_SAMPLES", 20)
    before, made = set(threading.enumerate()), make_metrics()
    written: list[tuple[int, str]] = []
    for number in range(30):
        add_steps(made, 1 + number % 5)
        write_line(made, lambda _, number=number: written.append((number, threading.current_thread().name)))
    made.wait()
    assert written == [(number, "meseta-metrics") for number in range(30)]
    made.close()
    assert set(threading.enumerate()) <= before


def test_training_waits_for_a_slow_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_metrics, "HANDOVER_SAMPLES", 1)
    gate, made, num_handed_over, written = threading.Event(), make_metrics(), [0], list[int]()

    def train_steps() -> None:
        for number in range(40):
            add_steps(made, 1)
            write_line(made, lambda _, number=number: (gate.wait(TIMEOUT_S), written.append(number)))
            num_handed_over[0] += 1

    training = threading.Thread(target=train_steps, daemon=True)
    training.start()
    seen, deadline_s = -1, time.monotonic() + TIMEOUT_S
    while seen != num_handed_over[0] or not seen:
        assert time.monotonic() < deadline_s
        seen = num_handed_over[0]
        time.sleep(0.2)
    assert seen <= MAX_PENDING_JOBS and not written
    gate.set()
    training.join(TIMEOUT_S)
    made.close()
    assert written == list(range(40))


def test_an_error_of_a_line_is_raised_once_and_ends_the_lines() -> None:
    for finish in (BackgroundMetrics.start_line, BackgroundMetrics.wait, BackgroundMetrics.close):
        made, written = make_metrics(), list[int]()

        def write(_: Any, written: list[int] = written) -> None:
            written.append(len(written))
            if len(written) == 2:
                raise MesetaError("no space")

        gate = threading.Event()
        made.write(lambda gate=gate: gate.wait(TIMEOUT_S))
        for _ in range(2):
            add_steps(made, 2)
            write_line(made, write)
        gate.set()
        made._jobs.join()
        add_steps(made, 2)
        made.write(lambda write=write: write({}))
        with pytest.raises(MesetaError, match="no space"):
            finish(made)
        made.close()
        assert written == [0, 1]


def test_a_wrong_label_is_refused_with_its_text() -> None:
    made = make_metrics()
    made.add(torch.zeros(3), make_batch(np.array([0, 1, 7], np.float32)))
    write_line(made, lambda _: None)
    with pytest.raises(MesetaError, match=r"metrics: the label of sample 2 must be 0 or 1; fix the label column"):
        made.close()


def test_nothing_else_of_a_batch_stays_alive() -> None:
    made = make_metrics()
    batch = make_batch(np.zeros(4, np.float32))
    gone = [weakref.ref(one) for one in (batch, batch.dense, batch.sparse, batch.sparse.values)]
    made.add(torch.zeros(4), batch)
    del batch
    assert [one() for one in gone] == [None] * 4


def test_jobs_after_an_error_are_dropped_until_it_is_popped() -> None:
    jobs, done, gate = BackgroundJobs("meseta-test", 3), list[str](), threading.Event()

    def fail() -> None:
        gate.wait(TIMEOUT_S)
        raise ValueError("first")

    jobs.submit(fail)
    jobs.submit(lambda: done.append("queued"))
    gate.set()
    jobs.join()
    jobs.submit(lambda: done.append("late"))
    jobs.join()
    assert jobs.has_failed and str(jobs.pop_error()) == "first" and jobs.pop_error() is None
    jobs.submit(lambda: done.append("next"))
    jobs.join()
    assert done == ["next"] and not jobs.has_failed


def slow_down(patch: pytest.MonkeyPatch, delay_s: float) -> None:
    append = RunDir.append_metrics

    def append_slowly(self: RunDir, line: Any) -> None:
        time.sleep(delay_s)
        append(self, line)

    patch.setattr(RunDir, "append_metrics", append_slowly)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of which tests compare the lines."""
    run_dir = tmp_path_factory.mktemp("background") / "whole"
    train(settings(tiny, run_dir, **COMMON))
    return run_dir


COMMON = {"checkpoint__every_steps": 3, "train__eval_every_steps": 5, "train__epochs": 2, "train__log_every_steps": 2}


def test_a_checkpoint_and_an_evaluation_follow_all_lines_before_them(
    whole: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, seen = tmp_path / "run", list[tuple[str, int, list[int]]]()

    def last_steps() -> list[int]:
        return [line["step"] for line in metrics(run_dir) if line["kind"] == "train"][-1:]

    save, evaluate = CheckpointManager.save, trainer.evaluate

    def check_save(self: CheckpointManager, step: int, *arguments: Any, **named: Any) -> None:
        seen.append(("save", step, last_steps()))
        save(self, step, *arguments, **named)

    def check_evaluate(model: Any, *arguments: Any) -> Any:
        seen.append(("evaluate", model.embeddings.step, last_steps()))
        return evaluate(model, *arguments)

    monkeypatch.setattr(CheckpointManager, "save", check_save)
    monkeypatch.setattr(trainer, "evaluate", check_evaluate)
    slow_down(monkeypatch, 0.02)
    num_steps = train(settings(tiny, run_dir, **COMMON))["num_steps"]
    assert {kind for kind, *_ in seen} == {"save", "evaluate"} and len(seen) > 10
    for kind, step, lines in seen:
        assert lines == [step if step == num_steps else step - step % 2] or step < 2, (kind, step)
    assert without_times(metrics(run_dir)) == without_times(metrics(whole))


class SimulatedKill(Exception):
    """Exception that simulates a killed process."""


def test_lines_lost_by_a_kill_are_written_again(
    whole: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after step 11, when no line after the checkpoint of step 9 is on disk."""
    run_dir, step, append = tmp_path / "run", Pipeline._train_step, RunDir.append_metrics

    def die(self: Pipeline, *arguments: Any) -> Any:
        if self.model.embeddings.step == 11:
            raise SimulatedKill
        return step(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(SimulatedKill):
        patch.setattr(Pipeline, "_train_step", die)
        patch.setattr(RunDir, "append_metrics", lambda self, line: append(self, line) if line.step <= 9 else None)
        train(settings(tiny, run_dir, **COMMON))
    assert max(line["step"] for line in metrics(run_dir)) < 9
    train(settings(tiny, run_dir, **COMMON))
    assert without_times(metrics(run_dir)) == without_times(metrics(whole))
    assert final_checksum(run_dir) == final_checksum(whole)


def test_an_error_in_a_step_loses_no_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Pipeline._train_step

    def fail(self: Pipeline, *arguments: Any) -> Any:
        if self.model.embeddings.step == 8:
            raise MesetaError("a failure")
        return step(self, *arguments)

    monkeypatch.setattr(Pipeline, "_train_step", fail)
    slow_down(monkeypatch, 0.05)
    before = set(threading.enumerate())
    with pytest.raises(MesetaError, match="step 9: a failure"):
        train(settings(tiny, tmp_path / "run", train__log_every_steps=1))
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 9))
    assert set(threading.enumerate()) <= before


def test_a_full_disk_ends_the_run_before_the_next_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, append = tmp_path / "run", RunDir.append_metrics

    def fail(self: RunDir, line: Any) -> None:
        with self._wrap_write_errors():
            if line.step == 4:
                raise OSError(28, FULL)
        append(self, line)

    monkeypatch.setattr(RunDir, "append_metrics", fail)
    before = set(threading.enumerate())
    with pytest.raises(MesetaError) as caught:
        train(settings(tiny, run_dir, **COMMON))
    assert (
        str(caught.value) == f"run_dir {str(run_dir)!r} cannot be written: {FULL}; free space there, or choose another"
    )
    assert [line["step"] for line in metrics(run_dir)] == [2]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000000003"]
    assert set(threading.enumerate()) <= before
