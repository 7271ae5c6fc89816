"""Runs with quantized rows in their checkpoints: training does not change unless it resumes from one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.checkpoint import compare, latest_complete, summarize
from meseta.checkpoint.files.block import group_files_by_block, read_chain
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.system.interruption import TrainingInterrupt
from meseta.train.trainer import Trainer
from small_run import final_checksum, metrics, settings, train, without_times

STEPS = {"train__epochs": 2, "checkpoint__every_steps": 4, "checkpoint__keep_last": 99, "train__max_steps": 18}


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:09d}"


def forms(run_dir: Path, step: int) -> set[str]:
    """Return the codecs of the rows in the checkpoint's own files."""
    tables = read_manifest(checkpoint_of(run_dir, step))["tables"].values()
    files = [file for table in tables for file in table["blocks"] if not file["path"].startswith("../")]
    return {file.get("codes", {}).get("row", "exact") for file in files}


def values_of(path: Path, table: str) -> dict[str, np.ndarray]:
    """Return all values of a table, dequantized."""
    entry = read_manifest(path)["tables"][table]
    schema = BlockSchema.from_dict(entry)
    parts = [read_chain(path, schema, files, copy=True) for files in group_files_by_block(entry)]
    return {column.name: np.concatenate([part[column.name] for part in parts]) for column in schema.columns}


def stop_before(document: dict[str, Any], step: int) -> None:
    """Train and delete the last checkpoint, as if the run had been killed after the one before."""
    train({**document, "train": {**document["train"], "max_steps": step}})
    shutil.rmtree(checkpoint_of(Path(document["run_dir"]), step))


@pytest.fixture(scope="module")
def exact_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with exact checkpoints. Tests only read it."""
    run_dir = tmp_path_factory.mktemp("exact")
    train(settings(tiny, run_dir, **STEPS))
    return run_dir


@pytest.mark.parametrize("deltas", ["none", "consecutive"])
def test_quantized_checkpoints_do_not_change_training(tiny: Path, exact_run: Path, tmp_path: Path, deltas: str) -> None:
    train(settings(tiny, tmp_path / "coded", checkpoint__bits=2, checkpoint__deltas=deltas, **STEPS))
    runs = (tmp_path / "coded", exact_run)
    assert final_checksum(runs[0]) == final_checksum(exact_run)
    assert without_times(metrics(runs[0])) == without_times(metrics(exact_run))
    assert [forms(tmp_path / "coded", step) for step in (4, 8, 16, 18)] == [{"int2"}] * 3 + [{"exact"}]
    manifests = [read_manifest(checkpoint_of(run, 8)) for run in runs]
    for key in ("dense", "reader", "plan", "step"):
        assert manifests[0][key] == manifests[1][key]
    states = [{**m["state"], "train_s": 0, "run_id": ""} for m in manifests]
    assert states[0] == states[1]
    for table, errors in manifests[0]["quantised"].items():
        coded, exact = (values_of(checkpoint_of(run, 8), table) for run in runs)
        assert 0 < np.abs(coded["row"].astype(float) - exact["row"]).max() <= errors["row"]
        assert (coded["sum"] == exact["sum"]).all()
    final = read_manifest(checkpoint_of(tmp_path / "coded", 18))
    assert final["format"] == "meseta.checkpoint/1"
    assert list(compare(*(checkpoint_of(run, 18) for run in runs))) == []


@pytest.mark.parametrize("deltas", [pytest.param("none", marks=pytest.mark.soak), "consecutive"])
def test_resumed_more_often_than_expected(tiny: Path, tmp_path: Path, deltas: str) -> None:
    changes = {"checkpoint__bits": "auto", "checkpoint__expected_restores": 1, "checkpoint__deltas": deltas}
    document = settings(tiny, tmp_path / "run", **STEPS | changes)
    for step in (5, 9, 13):
        stop_before(document, step)
        before = values_of(checkpoint_of(tmp_path / "run", step - 1), "user")
    train(document)
    assert [forms(tmp_path / "run", step) for step in (4, 8, 12, 16, 18)] == [
        {"int2"},
        {"int2"},
        {"int3"},  # resumed twice
        {"int3"},
        {"exact"},
    ]
    restores = [read_manifest(checkpoint_of(tmp_path / "run", s))["state"].get("restores") for s in (4, 8, 12, 16, 18)]
    assert restores == [None, 1, 2, 3, 3]
    after = values_of(checkpoint_of(tmp_path / "run", 16), "user")
    unchanged = before["sum"] == after["sum"]  # every step of a row increases its sum
    assert 0 < unchanged.sum() < len(unchanged)
    assert (before["row"][unchanged] == after["row"][unchanged]).all()


def test_widths_of_tables(tiny: Path, tmp_path: Path) -> None:
    changes = {"checkpoint__bits": 8, "checkpoint__tables": {"item": {"bits": 3}, "city": {"bits": "exact"}}}
    train(settings(tiny, tmp_path / "run", **STEPS | changes))
    tables = read_manifest(checkpoint_of(tmp_path / "run", 4))["tables"]
    codecs = {name: {file.get("codes", {}).get("row") for file in table["blocks"]} for name, table in tables.items()}
    assert codecs == {"user": {"int8"}, "item": {"int3"}, "city": {None}, "tags": {"int8"}}


@pytest.mark.parametrize(("on_signal", "expected"), [("exact", {"exact"}), ("delta", {"int4"})])
def test_a_signal(tiny: Path, tmp_path: Path, on_signal: str, expected: set[str]) -> None:
    changes = {"checkpoint__bits": 4, "checkpoint__on_signal": on_signal, "checkpoint__deltas": "rolling"}
    document = settings(tiny, tmp_path / "run", **STEPS | changes)
    trainer = Trainer(RunConfig.model_validate(document), World.current())
    save = trainer.checkpoint_manager.save

    def save_and_stop(step: int, *arguments: Any, **options: Any) -> None:
        save(step, *arguments, **options)
        trainer.checkpoint_manager.signal_listener.signal_number = signal.SIGTERM

    trainer.checkpoint_manager.save = save_and_stop  # type: ignore[method-assign]
    with pytest.raises(TrainingInterrupt):
        trainer.run()
    path = latest_complete(tmp_path / "run" / "checkpoints")
    assert path is not None
    assert path != checkpoint_of(tmp_path / "run", 4)
    assert forms(tmp_path / "run", summarize(path).step) == expected
    assert (summarize(path).policy is None) == (on_signal == "exact")


def test_the_best_is_exact(tiny: Path, tmp_path: Path) -> None:
    changes = {"checkpoint__bits": 4, "train__finish": "best", "train__eval_every_steps": 3}
    train(settings(tiny, tmp_path / "run", **STEPS | changes))
    best = [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "eval"]
    exact = {
        step
        for step in best
        if checkpoint_of(tmp_path / "run", step).exists() and forms(tmp_path / "run", step) == {"exact"}
    }
    assert exact - {18}
