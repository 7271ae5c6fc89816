"""Callbacks see every event of a run, may stop it, and change no bit of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

import meseta
from api.conftest import CONFIG
from meseta.api.callbacks import CallbackRunner
from meseta.comm import World
from meseta.errors import MesetaError
from meseta.system.environment_variables import environ
from meseta.telemetry.metrics_file import EvalLine, TrainLine
from meseta.telemetry.run_events import CheckpointEvent, EndEvent, StartEvent, StepEvent
from meseta.train.callback_client import CallbackClient
from small_run import final_checksum


class Recorder(meseta.Callback):
    """Records all events. It may stop the run, or raise an error, at the end of a step."""

    def __init__(self, stop_step: int | None = None, on_step: Callable[[int], None] | None = None) -> None:
        self.events: list[Any] = []
        self._stop_step, self._on_step = stop_step, on_step

    def on_start(self, event: StartEvent) -> None:
        self.events.append(event)

    def on_step(self, event: StepEvent) -> bool:
        self.events.append(event)
        if self._on_step is not None:
            self._on_step(event.step)
        return event.step == self._stop_step

    def on_log(self, line: TrainLine) -> None:
        self.events.append(line)

    def on_evaluate(self, line: EvalLine) -> None:
        self.events.append(line)

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        self.events.append(event)

    def on_end(self, event: EndEvent) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        """Return the events of a class."""
        return [event for event in self.events if isinstance(event, kind)]


def test_callbacks_see_all_events_and_change_no_bit(table: pa.Table, trained: meseta.Run, tmp_path: Path) -> None:
    recorder = Recorder()
    run = meseta.fit(table, "label", config=CONFIG, run_dir=tmp_path / "run", callbacks=[recorder])
    assert final_checksum(run.path) == final_checksum(trained.path)
    start, end = recorder.events[0], recorder.events[-1]
    assert (start.step, start.num_ranks, end.outcome) == (0, 1, "completed")
    assert [event.step for event in recorder.of(StepEvent)] == list(range(1, end.step + 1))
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for line_class, kind in ((TrainLine, "train"), (EvalLine, "eval")):
        expected = [line for line in lines if line["kind"] == kind]
        assert [line.to_dict() for line in recorder.of(line_class)] == expected and expected
    # Each log line comes directly before the event of its step. Checkpoints are written in the background.
    ordered = [event for event in recorder.events if not isinstance(event, CheckpointEvent)]
    for place, event in enumerate(ordered):
        if isinstance(event, TrainLine):
            assert ordered[place + 1] == StepEvent(kind="step", step=event.step, num_samples=event.num_samples)
    saved = recorder.of(CheckpointEvent)
    assert {event.path for event in saved} >= {str(entry.path) for entry in run.checkpoints}


@pytest.mark.soak
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_callback_stops_the_run_after_its_step(nproc: int, table: pa.Table, tmp_path: Path) -> None:
    train = CONFIG["train"] | {"epochs": 2, "eval_every_steps": 10, "early_stopping": {"patience": None}}
    # The evaluation at the stop is one more, on which a plateau schedule would depend.
    config = CONFIG | {"train": train | {"finish": "last"}, "schedule": {"kind": "constant"}}
    whole = meseta.fit(table, "label", config=config, run_dir=tmp_path / "whole", nproc=nproc)
    recorder = Recorder(stop_step=7)
    run = meseta.fit(table, "label", config=config, run_dir=tmp_path / "run", nproc=nproc, callbacks=[recorder])
    assert [event.step for event in recorder.of(StepEvent)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.step for event in recorder.of(CheckpointEvent)] == [7]
    assert recorder.events[-1] == EndEvent(kind="end", outcome="stopped", step=7, num_samples=7 * 64)
    assert set(run.metrics) == {"valid", "test"}  # The weights so far are evaluated.
    meseta.fit(table, "label", config=config, run_dir=run.path, nproc=nproc, callbacks=[Recorder()])
    assert final_checksum(run.path) == final_checksum(whole.path)


def test_records_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        StepEvent(kind="step", step=1, num_samples=2).step = 3  # type: ignore[misc]


def test_other_objects_are_refused(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="must be an object of a subclass of"):
        meseta.fit(table, "label", run_dir=tmp_path / "run", callbacks=[print])  # type: ignore[list-item]


@contextmanager
def connection(*callbacks: meseta.Callback) -> Iterator[tuple[CallbackRunner, CallbackClient]]:
    """Context manager with both ends of the pipes in this process."""
    with CallbackRunner(callbacks) as runner, pytest.MonkeyPatch.context() as patch:
        for name, value in runner.variables.items():
            patch.setitem(environ, name, value)
        client = CallbackClient(World.single())
        client.open()
        yield runner, client


def test_only_overridden_methods_make_training_wait() -> None:
    class Logs(meseta.Callback):
        def on_log(self, line: TrainLine) -> None:
            pass

    for callbacks, kinds in (((), set()), ((Logs(),), {"train"}), ((Logs(), Recorder()), {"train", "step", "eval"})):
        with connection(*callbacks) as (_, client):
            assert {kind for kind in ("start", "step", "train", "eval") if client.waits_for(kind)} == kinds


def test_any_callback_stops_the_run() -> None:
    with connection(Recorder(stop_step=2), Recorder(stop_step=3)) as (runner, client):
        for step, stops in ((1, False), (2, True)):
            client.send(StepEvent(kind="step", step=step, num_samples=step))
            runner.process()
            client.wait("step")
            assert client.should_stop == stops


def test_a_run_continues_if_its_callbacks_are_gone() -> None:
    """The other process ends it by a signal, so that it can save a checkpoint."""
    with connection(Recorder()) as (runner, client):
        client.send(StepEvent(kind="step", step=1, num_samples=1))
        runner._close(runner._answers_fd)
        client.wait("step")
        client.send(StepEvent(kind="step", step=2, num_samples=1))
        client.wait("step")
        assert not client.should_stop


class Failure(Exception):
    """Error of a callback."""


def fail_at(step: int) -> Callable[[int], None]:
    def fail(current: int) -> None:
        if current == step:
            raise Failure(f"step {step}")

    return fail


def test_an_error_of_a_callback_is_an_answer() -> None:
    """Training ends after this step, although no signal arrives."""
    with connection(Recorder(on_step=fail_at(1))) as (runner, client):
        client.send(StepEvent(kind="step", step=1, num_samples=1))
        with pytest.raises(Failure):
            runner.process()
        runner._close(runner._answers_fd)
        client.wait("step")
        assert client.is_interrupted and not client.should_stop


def fail_on_purpose(table: pa.Table, run_dir: Path, nproc: int) -> meseta.Run:
    broken = Recorder(on_step=fail_at(6))
    with pytest.raises(Failure, match="step 6"):
        meseta.fit(table, "label", config=CONFIG, run_dir=run_dir, nproc=nproc, callbacks=[broken])
    assert broken.events[-1] == EndEvent(kind="end", outcome="failed", error="step 6")
    run = meseta.open_run(run_dir)
    saved = run.checkpoints[-1].summary
    assert saved is not None and saved.step == 6 and "test" not in run.metrics
    return run


def test_an_error_of_a_callback_leaves_a_checkpoint(table: pa.Table, tmp_path: Path) -> None:
    fail_on_purpose(table, tmp_path / "run", nproc=1)


@pytest.mark.soak
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_resumes_after_an_error_of_a_callback(
    nproc: int, table: pa.Table, trained: meseta.Run, tmp_path: Path
) -> None:
    again = Recorder()
    run = fail_on_purpose(table, tmp_path / "run", nproc).resume(nproc, callbacks=[again])
    assert again.events[0].step == 6 and "test" in run.metrics
    if nproc == 1:
        assert final_checksum(run.path) == final_checksum(trained.path)


@pytest.mark.soak
@pytest.mark.parametrize("sleep_s", [25, 60])
def test_a_slow_callback_is_no_hang(
    sleep_s: int, table: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"comm": {"stall_timeout_s": 10}}

    def sleep(step: int) -> None:
        if step == 5:
            time.sleep(sleep_s)

    slow = Recorder(on_step=sleep)
    run = meseta.fit(table, "label", config=config, run_dir=tmp_path / "slow", nproc=2, callbacks=[slow])
    assert slow.events[-1].outcome == "completed"
    output = capsys.readouterr()
    assert "warning" not in output.out + output.err
    other = meseta.fit(table, "label", config=config, run_dir=tmp_path / "other", nproc=2)
    assert final_checksum(run.path) == final_checksum(other.path)


@pytest.mark.soak
def test_a_slow_log_or_evaluation_is_no_hang(
    table: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(meseta.Callback):
        def on_log(self, line: TrainLine) -> None:
            if line.step == 5:
                time.sleep(25)

        def on_evaluate(self, line: EvalLine) -> None:
            if line.split == "test":
                time.sleep(25)

    config = CONFIG | {"comm": {"stall_timeout_s": 10}}
    meseta.fit(table, "label", config=config, run_dir=tmp_path / "slow", nproc=2, callbacks=[Slow()])
    output = capsys.readouterr()
    assert "warning" not in output.out + output.err


@pytest.mark.soak
def test_trials_of_the_rate_search_call_no_callbacks(table: pa.Table, tmp_path: Path) -> None:
    recorder = Recorder()
    rows = pa.concat_tables([table] * 8)  # Few rows have no search.
    run = meseta.fit(rows, "label", run_dir=tmp_path / "run", callbacks=[recorder], config={"train": {"max_steps": 3}})
    assert (run.path / "trials.json").exists()
    assert len(recorder.of(StartEvent)) == 1 and [event.step for event in recorder.of(StepEvent)] == [1, 2, 3]
