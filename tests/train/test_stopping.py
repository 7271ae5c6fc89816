"""Early stopping and the best checkpoint: explicit evaluations, and whole runs that are interrupted and resumed."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from failing_reads import Read, failing_reads
from meseta.comm import World
from meseta.config import EarlyStoppingConfig, load_config
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.telemetry.metrics_file import EvalLine
from meseta.train.evaluation_tracker import EarlyStopping
from meseta.train.trained_model import load_trained
from small_run import final_checksum, metrics, settings, train, without_times, write_config


def feed(config: dict[str, Any], values: list[float | None]) -> tuple[EarlyStopping, list[bool]]:
    best = EarlyStopping(EarlyStoppingConfig(**config))
    return best, [
        best.update(EvalLine(step=10 * k, **{best.config.metric: value})) for k, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("config", "values", "better", "step", "stale"),
    [
        ({}, [0.9, 0.8, 0.85, 0.79], [True, True, False, True], 40, 0),
        ({"metric": "auc"}, [0.6, 0.7, 0.7, 0.65], [True, True, False, False], 20, 2),
        ({"min_delta": 0.1}, [1.0, 0.95, 0.91, 0.85], [True, False, False, True], 40, 0),
        ({}, [None, None], [False, False], None, 2),
        ({}, [None, 3.0, None], [False, True, False], 20, 1),
    ],
)
def test_the_best_of_some_evaluations(
    config: dict[str, Any], values: list[float | None], better: list[bool], step: int | None, stale: int
) -> None:
    best, got = feed(config, values)
    assert (got, best.best_step, best.num_without_improvement) == (better, step, stale)
    assert best.best_value == (None if step is None else values[step // 10 - 1])
    for patience in (1, 2, 3):
        assert feed({**config, "patience": patience}, values)[0].should_stop == (stale >= patience)
    assert not best.should_stop


def test_the_state_is_restored_unless_the_metric_changes() -> None:
    best, _ = feed({"patience": 2}, [0.5, 0.6])
    again, other = EarlyStopping(best.config), EarlyStopping(EarlyStoppingConfig(metric="auc"))
    again.set_state(best.get_state())
    other.set_state(best.get_state())
    again.set_state({})
    assert again.get_state() == best.get_state()
    assert (other.best_step, other.best_value, other.num_without_improvement) == (None, None, 0)


# No evaluation improves by ten: the first is the best, and two more end the run at step 12.
STOPS = {
    "train__eval_every_steps": 4,
    "train__log_every_steps": 3,
    "train__early_stopping": {"patience": 2, "min_delta": 10.0},
    "checkpoint__every_steps": 5,
    "checkpoint__keep_best": True,
    "checkpoint__keep_last": 1,
}


@pytest.fixture(scope="module")
def ended(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that stopped early and kept all its checkpoints. Tests only read it."""
    run_dir = tmp_path_factory.mktemp("stopping") / "run"
    train(settings(tiny, run_dir, train__epochs=3, **{**STOPS, "checkpoint__keep_last": 9}))
    return run_dir


def test_a_run_stops_and_stays_stopped(tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", train__epochs=3, **STOPS)
    summary = train(document)
    assert summary["num_steps"] == 12
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000000004", "step-000000012"]
    assert summary["best"] == {"metric": "ne", "step": 4, "value": summary["best"]["value"]}
    lines, checksum = metrics(tmp_path / "run"), final_checksum(tmp_path / "run")
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [4, 8, 12]
    assert summary["test"] == evaluations[-1] and summary["best"]["value"] == evaluations[0]["ne"]
    again = train(document)
    for key in ("num_steps", "num_samples", "test", "best", "checkpoint"):
        assert again[key] == summary[key]
    assert metrics(tmp_path / "run") == lines and final_checksum(tmp_path / "run") == checksum


def test_the_best_checkpoint_is_loaded(ended: Path, tmp_path: Path) -> None:
    newest, best = (load_trained(ended, "test", World.single(), best=b).step for b in (False, True))
    assert (newest, best) == (12, 4)
    shutil.copytree(ended, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000004")
    with pytest.raises(MesetaError, match=r"the best step is 4, but it has no checkpoint; train with checkpoint\.keep"):
        load_trained(tmp_path / "run", "test", World.single(), best=True)


def test_an_unreadable_best_checkpoint_is_not_reported_as_missing(ended: Path) -> None:
    manifest = str(ended / "checkpoints" / "step-000000004" / "manifest.json")

    def choose(read: Read) -> int | None:
        return errno.EIO if read.path == manifest and read.kind == "open" else None

    with (
        failing_reads(ended, choose=choose),
        pytest.raises(StorageError, match=r"cannot be read \(Input/output error\)"),
    ):
        load_trained(ended, "test", World.single(), best=True)


@pytest.mark.parametrize("newest", [4, 5, 10])
def test_an_interrupted_run_stops_at_the_same_step(tiny: Path, ended: Path, tmp_path: Path, newest: int) -> None:
    document = settings(tiny, tmp_path / "run", train__epochs=3, **{**STOPS, "checkpoint__keep_last": 9})
    shutil.copytree(ended, tmp_path / "run")
    lines, checksum = metrics(ended), final_checksum(ended)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > newest:
            shutil.rmtree(path)
    assert train(document)["num_steps"] == 12
    assert without_times(metrics(tmp_path / "run")) == without_times(lines)
    assert final_checksum(tmp_path / "run") == checksum


def test_patience_without_evaluations_is_refused(tmp_path: Path) -> None:
    document = settings(tmp_path, tmp_path / "run", train__early_stopping={"patience": 2})
    with pytest.raises(MesetaError, match=r"patience needs evaluations during training; set train\.eval_every_steps"):
        load_config(write_config(tmp_path / "config.yaml", document))


def test_the_best_of_a_run_without_evaluations(tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=3))
    assert load_trained(tmp_path / "run", "test", World.single(), best=True).step == 3  # the final checkpoint
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(MesetaError, match="there was no evaluation"):
        load_trained(tmp_path / "run", "test", World.single(), best=True)
