"""TensorBoard events of a run, read by TensorBoard's reader, against metrics.jsonl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bad_input.commands import small_files
from meseta.spec import MesetaError
from meseta.telemetry.metrics_file import EvalLine, TrainLine
from meseta.train.interop.tensorboard import TensorBoardWriter, scalars
from small_run import metrics, settings, train


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by tag, with duplicates."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def expected(run_dir: Path) -> dict[str, list[tuple[int, Any]]]:
    values: dict[str, list[tuple[int, Any]]] = {}
    for line in metrics(run_dir):
        for name in ("loss", "ne", "auc", "logloss", "lr_dense", "samples_per_s"):
            if name in line:
                values.setdefault(f"{line['kind']}/{name}", []).append(
                    (line["step"], pytest.approx(line[name], rel=1e-6))
                )
    return values


def test_all_lines_are_written_once_also_after_a_resume(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    common = {"train__loggers": ["tensorboard"], "train__eval_every_steps": 6, "checkpoint__every_steps": 5}
    train(settings(tiny, tmp_path / "run", **common, train__max_steps=9))
    first = points(tmp_path / "run/tensorboard")
    assert {tag: first[tag] for tag in expected(tmp_path / "run")} == expected(tmp_path / "run")
    assert [step for step, _ in first["train/loss"]] == [4, 8, 9]
    train(settings(tiny, tmp_path / "run", **common))
    again = points(tmp_path / "run/tensorboard")
    assert {tag: again[tag] for tag in expected(tmp_path / "run")} == expected(tmp_path / "run")
    assert "train/stages_s/backward" in again and "eval/kind" not in again


def test_numbers_of_a_line_and_their_tags() -> None:
    line = EvalLine.model_validate(
        {
            "kind": "eval",
            "step": 3,
            "split": "test",
            "auc": None,
            "ne": 0.5,
            "tasks": {"buy": {"auc": 1}},
            "curve": [1],
        }
    )
    assert list(scalars(line)) == [("eval/ne", 0.5), ("eval/tasks/buy/auc", 1.0)]


def test_tags_and_values_are_those_of_torch(tmp_path: Path) -> None:
    """Events equal those of torch's writer. One line is one event here."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    numbers = {"a b:c/é": 1.5, "large": 1e300, "none": math.nan, "stages_s": {"x y": 1}}
    line = TrainLine.model_validate({"kind": "train", "step": 3, "num_samples": 9} | numbers)
    board = TensorBoardWriter(tmp_path / "ours")
    board.begin([line])
    board.close()
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "torch"), purge_step=0)
    for tag, value in scalars(line):
        writer.add_scalar(tag, value, 3)
    writer.close()
    events_of = {}
    for name in ("ours", "torch"):
        [file] = (tmp_path / name).iterdir()
        events = list(loader.LegacyEventFileLoader(str(file)).Load())
        values = [(e.step, v.tag, repr(v.simple_value)) for e in events for v in e.summary.value]
        events_of[name] = values, [e.session_log.status for e in events if e.HasField("session_log")]
    assert events_of["ours"] == events_of["torch"] and len(events_of["ours"][0]) == 5


def test_a_full_disk_is_reported_once_and_keeps_whole_lines(tmp_path: Path) -> None:
    """No thread reports the error again, closing does not fail, and the complete events are readable."""
    pytest.importorskip("tensorboard")
    board, num_lines = TensorBoardWriter(tmp_path), 0
    board.begin([])
    with small_files(300), pytest.raises(MesetaError, match=r"cannot be written: File too large; free space"):
        while num_lines < 100:
            board.add(TrainLine(step=num_lines, num_samples=1, loss=0.5))
            num_lines += 1
    with small_files(300):
        board.close()
    assert [step for step, _ in points(tmp_path)["train/loss"]] == list(range(num_lines)) and num_lines > 1


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(MesetaError, match="cannot be written"):
        TensorBoardWriter(tmp_path / "file" / "board").begin([])
