"""Runs in MLflow and W&B, read with their own classes, against metrics.jsonl."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from bad_input.commands import run_here
from meseta.config import read_config_document, validate_document
from meseta.errors import FormerNameWarning, MesetaError
from meseta.system.environment import check_extras
from meseta.telemetry.metrics_file import EvalLine, Line, TrainLine
from meseta.train import observers
from meseta.train.interop.loggers import Outcome
from meseta.train.interop.tensorboard import scalars
from meseta.train.observers import BackgroundLogger
from meseta.train.run_dir import RunDir
from small_run import final_checksum, settings, train, write_config

Points = dict[str, list[tuple[int, float]]]


def expected_points(run_dir: Path) -> Points:
    points: Points = {}
    for line in RunDir(run_dir).lines():
        for tag, value in scalars(line):
            points.setdefault(tag, []).append((line.step, value))
    return points


def mlflow_run(run_dir: Path) -> tuple[Any, Points]:
    """Return the run in the store that the environment names, and its points."""
    import mlflow

    client, run_id = mlflow.MlflowClient(), json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    run = client.get_run(run_id)
    return run, {
        tag: [(point.step, point.value) for point in client.get_metric_history(run_id, tag)] for tag in run.data.metrics
    }


def records_of(path: Path) -> list[Any]:
    """Return the messages of a file of W&B, which has the log format of LevelDB after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, records, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # A whole record, or its last part.
            record = Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


def wandb_points(run_dir: Path) -> tuple[set[str], Points]:
    """Return the ids of the runs in the offline files of a folder, and their points."""
    points: Points = {}
    runs = set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records_of(path):
            if record.HasField("run"):
                runs.add(record.run.run_id)
            if record.HasField("history"):
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for tag, value in values.items():
                    if tag != "step" and not tag.startswith("_"):
                        points.setdefault(tag, []).append((values["step"], value))
    return runs, points


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file store of MLflow, and offline runs of W&B."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("stores")
def test_all_lines_are_logged_once_also_after_a_resume(tiny: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    common = {
        "train__loggers": ["mlflow", "wandb"],
        "train__eval_every_steps": 6,
        "checkpoint__every_steps": 4,
        "checkpoint__keep_last": 3,
    }
    train(settings(tiny, run_dir, **common, train__max_steps=10))
    first, points = mlflow_run(run_dir)
    assert points == wandb_points(run_dir)[1] == expected_points(run_dir)
    assert first.info.status == "FINISHED" and first.data.params["train.batch_size"] == "90"
    # As after a kill, the newest checkpoint is older than the newest points.
    for step in (8, 10):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:09d}")
    train(settings(tiny, run_dir, **common))
    again, points = mlflow_run(run_dir)
    assert again.info.run_id == first.info.run_id and len(wandb_points(run_dir)[0]) == 1
    for logged in (points, wandb_points(run_dir)[1]):
        for tag, values in expected_points(run_dir).items():
            steps = [step for step, _ in logged[tag]]
            assert steps == sorted(set(steps)) and set(steps) >= {step for step, _ in values}, tag
            if tag == "train/loss":  # Time measurements differ, but the result of a step does not.
                assert dict(logged[tag]) == dict(values) | {10: dict(logged[tag])[10]}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("stores")
def test_names_of_labels_are_those_that_a_store_accepts(tmp_path: Path) -> None:
    from meseta.train.interop.loggers import make_logger

    config = validate_document({"run_dir": str(tmp_path / "run"), "data": {"dir": "x"}})
    (tmp_path / "run").mkdir()
    line = EvalLine.model_validate({"kind": "eval", "step": 3, "split": "test", "tasks": {"buy, now": {"auc": 0.5}}})
    logger = make_logger("mlflow", config, RunDir(tmp_path / "run"))
    logger.begin([line])
    logger.close("interrupted")
    run, points = mlflow_run(tmp_path / "run")
    assert points == {"eval/tasks/buy_ now/auc": [(3, 0.5)]} and run.info.status == "KILLED"


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_does_not_respond_ends_no_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    changes = {"train__max_steps": 3}
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **changes, train__loggers=["mlflow"]))
    ended = run_here("train", config)
    assert ended.code == 0 and "warning: logger 'mlflow' has failed: " in ended.err, ended
    train(settings(tiny, tmp_path / "other", **changes))
    assert final_checksum(tmp_path / "run") == final_checksum(tmp_path / "other")


class FakeLogger:
    """Logger that waits, or fails, at a line."""

    def __init__(self, *, fails: bool) -> None:
        self.steps: list[int] = []
        self.released = threading.Event()
        self._fails = fails

    def begin(self, lines: list[Line]) -> None:
        pass

    def add(self, line: Line) -> None:
        if line.step == 2:
            if self._fails:
                raise RuntimeError("no space\nleft")
            self.released.wait()
        self.steps.append(line.step)

    def close(self, outcome: Outcome) -> None:
        pass


@pytest.mark.parametrize("fails", [True, False])
def test_a_logger_that_fails_or_waits_is_reported_once(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, warnings = FakeLogger(fails=fails), deque[str]()
    monkeypatch.setattr(observers, "make_logger", lambda *_: fake)
    if not fails:
        monkeypatch.setattr(observers, "MAX_PENDING_LINES", 4)
    config = validate_document({"run_dir": str(tmp_path), "data": {"dir": "x"}})
    logger = BackgroundLogger("mlflow", config, RunDir(tmp_path), warnings)
    logger.begin([])
    for step in range(1, 9):
        logger.add(TrainLine(kind="train", step=step, num_samples=step))
    logger.start_close("completed")
    logger.wait(5.0 if fails else 0.1)
    reason = "no space" if fails else "it is 4 lines behind"
    assert len(warnings) == 1 and f"has failed: {reason}; training continues" in warnings[0]
    assert fake.steps == [1] or not fails
    fake.released.set()


def test_a_logger_that_does_not_respond_at_the_end_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake, warnings = FakeLogger(fails=False), deque[str]()
    monkeypatch.setattr(observers, "make_logger", lambda *_: fake)
    logger = BackgroundLogger(
        "mlflow", validate_document({"run_dir": "x", "data": {"dir": "x"}}), RunDir(tmp_path), warnings
    )
    logger.begin([])
    logger.add(TrainLine(kind="train", step=2, num_samples=2))
    logger.wait(0.05)
    assert len(warnings) == 1 and "it does not respond" in warnings[0]
    fake.released.set()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_error_line_before_data_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    ended = run_here("train", "--data", "missing.csv", f"run_dir={tmp_path}", f"train.loggers=[{name}]")
    assert ended.code == 1 and len(ended.errors) == 1
    assert f"pip install 'meseta[{name}]', or remove '{name}' from train.loggers" in ended.errors[0]


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_new_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MesetaError, match="a_new_package is not installed"):
        check_extras(["a_new_package"], "train.loggers")


@pytest.mark.parametrize(
    ("overrides", "loggers"),
    [
        (["train.tensorboard=true"], ("tensorboard",)),
        (["train.tensorboard=false"], ()),
        (["train.loggers=[wandb]", "train.tensorboard=true"], ("wandb", "tensorboard")),
    ],
)
def test_the_former_key_means_tensorboard(overrides: list[str], loggers: tuple[str, ...]) -> None:
    with pytest.warns(FormerNameWarning, match=r"write train.loggers: \[tensorboard\]"):
        document = read_config_document(None, ["run_dir=x", "data.dir=y", *overrides])
    assert validate_document(document).train.loggers == loggers
