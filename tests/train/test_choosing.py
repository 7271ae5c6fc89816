"""Runs that select on a validation split: early stopping, best weights and falling rates, also if interrupted
anywhere."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from meseta.cli.main import app
from meseta.cli.train import _print_result
from meseta.comm import World
from meseta.config import RunConfig
from meseta.pipeline import Pipeline
from meseta.spec import MesetaError
from meseta.system.interruption import TrainingInterrupt
from meseta.train import trainer
from meseta.train.evaluate import evaluate
from meseta.train.run_dir import RunDir
from meseta.train.state import dense_tensors
from meseta.train.trained_model import TrainedModel, load_trained
from meseta.train.trainer import Trainer
from sampling import sample
from small_run import final_checksum, metrics, settings, tiny_with_valid, train, without_times


@pytest.fixture(scope="session")
def data(tiny: Path) -> Path:
    return tiny_with_valid(tiny)


NUM_ROWS = (337, 279)
"""Rows of the splits valid and test."""
# 884 training rows are 11 steps per epoch. No evaluation improves by ten, so the first one stays the best.
FIRST_IS_BEST = {
    "train__batch_size": 85,
    "train__epochs": 2,
    "train__eval_every_epochs": 0.5,  # after steps 6, 11, 17
    "train__early_stopping": {"min_delta": 10.0},
    "train__finish": "best",
    "checkpoint__every_steps": 4,
    "checkpoint__keep_last": 1,
}
FALLING = {
    **FIRST_IS_BEST,
    "train__log_every_steps": 1,
    "schedule": {"kind": "plateau", "plateau_patience": 1, "step_factor": 0.5, "end_factor": 0.2},
    "embedding__schedule": {"kind": "plateau", "plateau_patience": 2, "warmup_steps": 2},
}


@pytest.fixture(scope="module")
def ended_trainer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a trainer whose run has ended with the weights of step 6."""
    run_dir = tmp_path_factory.mktemp("choosing") / "ended"
    finished = Trainer(RunConfig.model_validate(settings(data, run_dir, **FIRST_IS_BEST)), World.current())
    finished.run()
    return finished


@pytest.fixture(scope="module")
def ended(ended_trainer: Trainer) -> Path:
    """Return the run folder of `ended_trainer`. Tests that continue the run copy it."""
    return ended_trainer.config.run_dir


def summary_of(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return document


def evaluations(run_dir: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["split"]) for line in metrics(run_dir) if line["kind"] == "eval"]


def evaluated_metrics(trained: TrainedModel) -> dict[str, Any]:
    """Return the metrics of a loaded model on its split."""
    return evaluate(trained.model, trained.reader, trained.world, logit_shift=trained.logit_shift).to_dict()


def test_valid_decides_and_test_is_read_once(data: Path, tmp_path: Path) -> None:
    changes = {
        "train__epochs": 3,
        "train__eval_every_steps": 4,
        "train__early_stopping": {"patience": 2, "min_delta": 10.0},
        "checkpoint__keep_best": True,
    }
    summary = train(settings(data, tmp_path / "run", **changes))
    assert evaluations(tmp_path / "run") == [(4, "valid"), (8, "valid"), (12, "valid"), (12, "test")]
    assert summary["best"] == {"metric": "ne", "split": "valid", "step": 4, "value": summary["best"]["value"]}
    assert summary["selected"] == {"split": "valid", "what": ["early stopping", "the best weights"]}
    assert (summary["valid"]["num_samples"], summary["test"]["num_samples"]) == NUM_ROWS
    for split in ("valid", "test"):  # both are of the last weights
        expected = evaluated_metrics(load_trained(tmp_path / "run", split, World.single()))
        assert {key: summary[split][key] for key in expected} == expected and summary[split]["step"] == 12
    assert load_trained(tmp_path / "run", "test", World.single(), best=True).step == 4


def test_the_best_weights_are_those_of_a_run_that_ended_there(data: Path, ended: Path, tmp_path: Path) -> None:
    summary = summary_of(ended)
    until = {**FIRST_IS_BEST, "train__max_steps": 6, "train__finish": "last"}
    oracle = train(settings(data, tmp_path / "oracle", **until))
    for split in ("valid", "test"):
        assert without_times([summary[split]]) == without_times([oracle[split]])
    assert summary["num_steps"] == 22 and summary["checkpoint"].endswith("step-000000006")
    assert evaluations(ended) == [(6, "valid"), (11, "valid"), (17, "valid"), (22, "valid"), (6, "test")]
    taken, best = (load_trained(ended, "test", World.single(), best=b) for b in (False, True))
    assert taken.step == best.step == 6
    expected = evaluated_metrics(taken)
    assert {key: summary["test"][key] for key in expected} == expected
    kept = sorted(path.name for path in (ended / "checkpoints").glob("step-*"))
    assert kept == ["step-000000006", "step-000000022"]


def test_commands_take_the_checkpoint_that_the_run_ended_with(ended: Path) -> None:
    for place, step in ((ended, 6), (ended / "checkpoints", 22), (ended / "checkpoints/step-000000022", 22)):
        result = CliRunner().invoke(app, ["checkpoint", "inspect", str(place), "--json"])
        assert json.loads(result.stdout)["step"] == step


def test_the_model_of_a_trainer_has_the_best_weights(ended_trainer: Trainer, ended: Path) -> None:
    loaded = load_trained(ended, "test", World.single(), best=True)
    for trained, stored in zip(ended_trainer.model.embeddings.shards, loaded.model.embeddings.shards, strict=True):
        assert torch.equal(trained.weight, stored.weight)
    parts = [dense_tensors(one.model, ended_trainer.optimizer, World.single()) for one in (ended_trainer, loaded)]
    assert all(torch.equal(parts[0][name], value) for name, value in parts[1].items() if name.startswith("model."))


@pytest.fixture(scope="module")
def ended_without_valid(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("choosing") / "without-valid"
    train(settings(tiny, run_dir, **FIRST_IS_BEST))
    return run_dir


def test_without_valid_the_best_weights_are_not_evaluated_again(ended_without_valid: Path) -> None:
    summary = summary_of(ended_without_valid)
    assert evaluations(ended_without_valid) == [(8, "test"), (15, "test"), (23, "test"), (30, "test")]
    assert summary["test"]["step"] == 8 and "valid" not in summary
    assert summary["selected"] == {"split": "test", "what": ["the best weights"]}


def test_train_prints_what_the_test_split_decided(
    ended: Path, ended_without_valid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_result(summary_of(ended_without_valid), ended_without_valid)
    assert "note: the test split decided the best weights, so" in capsys.readouterr().out
    _print_result(summary_of(ended), ended)
    assert "note:" not in capsys.readouterr().out


def test_the_last_weights_may_be_the_best(data: Path, tmp_path: Path) -> None:
    summary = train(settings(data, tmp_path / "run", **{**FIRST_IS_BEST, "train__early_stopping": {}}))
    values = {line["step"]: line["ne"] for line in metrics(tmp_path / "run") if line.get("split") == "valid"}
    assert min(values, key=values.__getitem__) == 22, "the data were to be learned for two epochs"
    assert summary["test"]["step"] == summary["valid"]["step"] == summary["best"]["step"] == 22


def rates(run_dir: Path) -> list[tuple[float, float]]:
    return [(line["lr_sparse"], line["lr_dense"]) for line in metrics(run_dir) if line["kind"] == "train"]


def test_rates_fall_if_evaluations_do_not_improve(whole: Path) -> None:
    # The evaluations after steps 11 and 17 do not improve. The dense rate falls after each, but not below a fifth. The
    # rate of tables has its own schedule: it falls after both, to a tenth.
    dense = [1.0] * 11 + [0.5] * 6 + [0.25] * 5
    tables = [0.5, 1.0] + [1.0] * 15 + [0.1] * 5
    expected = [(0.1 * one, 0.01 * other) for one, other in zip(tables, dense, strict=True)]
    assert rates(whole) == [pytest.approx(pair) for pair in expected]


class SimulatedKill(Exception):
    """Exception that simulates a killed process."""


def train_until_killed(
    patch: pytest.MonkeyPatch, document: dict[str, Any], owner: Any, name: str, at: Callable[..., bool]
) -> None:
    """Train until `owner.name` is called with arguments for which `at` is true, and stop right after that call."""
    original = getattr(owner, name)

    def die(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if at(*arguments):
            raise SimulatedKill
        return result

    with patch.context() as patched, pytest.raises(SimulatedKill):
        patched.setattr(owner, name, die)
        train(document)


def in_step(step: int) -> tuple[Any, str, Callable[..., bool]]:
    return Pipeline, "_train_step", lambda self, *_: self.model.embeddings.step == step


def in_evaluation(split: str, number: int) -> tuple[Any, str, Callable[..., bool]]:
    calls = iter(range(1, 99))
    return trainer, "evaluate", lambda model, reader, *_: reader.split == split and next(calls) == number


PLACES: dict[str, Callable[[], tuple[Any, str, Callable[..., bool]]]] = {
    **{f"step {step}": lambda step=step: in_step(step) for step in (5, 7, 12, 18, 22)},  # type: ignore[misc]
    **{f"valid {k}": lambda k=k: in_evaluation("valid", k) for k in (1, 2, 4)},  # type: ignore[misc]
    "test": lambda: in_evaluation("test", 1),
    "the best weights": lambda: (trainer, "restore", lambda *_: True),
    "the summary": lambda: (RunDir, "write_json", lambda self, name, *_: name == "summary.json"),
}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("choosing") / "whole"
    train(settings(data, run_dir, **FALLING))
    return run_dir


def check_equal(run_dir: Path, whole: Path) -> None:
    assert without_times(metrics(run_dir)) == without_times(metrics(whole))
    assert final_checksum(run_dir) == final_checksum(whole)
    of_both = []
    for path in (run_dir, whole):
        manifests = sorted((path / "checkpoints").glob("step-*/manifest.json"))
        states = [json.loads(file.read_text()) for file in manifests]
        summary = json.loads((path / "summary.json").read_text())
        final = RunDir(path).final_checkpoint()
        of_both.append(
            [
                [(one["step"], one["checksum"]) for one in states],
                [{key: one["state"][key] for key in ("best", "evaluated", "plateaus")} for one in states],
                without_times([summary["test"], summary["valid"], summary["best"]]),
                final and final.name,
            ]
        )
    assert of_both[0] == of_both[1]


@pytest.mark.parametrize("place", sample(PLACES, k=1, seed=5))
def test_a_run_killed_anywhere_resumes_identically(
    data: Path, whole: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = settings(data, tmp_path / "run", **FALLING)
    train_until_killed(monkeypatch, document, *PLACES[place]())
    torch.manual_seed(99)
    train(document)
    check_equal(tmp_path / "run", whole)


def test_a_run_stopped_by_a_signal_resumes_identically(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = settings(data, tmp_path / "run", **FALLING)
    step = Pipeline._train_step

    def signalled(self: Pipeline, *arguments: Any) -> Any:
        if self.model.embeddings.step in (10, 16):  # the evaluation of a step precedes the end of the step
            running.checkpoint_manager.signal_listener.signal_number = signal.SIGTERM
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_train_step", signalled)
        for at in (11, 17):
            running = Trainer(RunConfig.model_validate(document), World.current())
            with pytest.raises(TrainingInterrupt):
                running.run()
            assert running.step == at
            # The run has not ended, so the newest checkpoint is loaded.
            assert load_trained(tmp_path / "run", "test", World.single()).step == at
    train(document)
    check_equal(tmp_path / "run", whole)


def test_a_finished_run_is_shown_again(data: Path, ended: Path, tmp_path: Path) -> None:
    first, run_dir = summary_of(ended), Path(shutil.copytree(ended, tmp_path / "ended"))
    again = train(settings(data, run_dir, **FIRST_IS_BEST))
    assert without_times(metrics(run_dir)) == without_times(metrics(ended))
    assert final_checksum(run_dir) == final_checksum(ended)
    assert without_times([again["test"], again["valid"]]) == without_times([first["test"], first["valid"]])
    for key in ("best", "num_steps", "num_samples", "ids_outside"):
        assert again[key] == first[key]
    assert Path(again["checkpoint"]).name == Path(first["checkpoint"]).name == "step-000000006"


def test_more_epochs_continue_from_the_last_weights(
    data: Path, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ended, tmp_path / "cut")
    capsys.readouterr()
    longer = {**FIRST_IS_BEST, "train__epochs": 3}
    summary = train(settings(data, tmp_path / "cut", **longer))
    assert "resuming from step 22 (the last; the best so far is step 6)" in capsys.readouterr().err
    oracle = train(settings(data, tmp_path / "whole", **longer))
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")
    assert without_times([summary["test"], summary["best"]]) == without_times([oracle["test"], oracle["best"]])
    assert summary["num_steps"] == 33


def test_the_end_of_a_continued_run_may_stay_its_best(data: Path, tmp_path: Path) -> None:
    """The last evaluation of the first part follows its checkpoint, so the second part reads it from the metrics."""
    gains = {**FIRST_IS_BEST, "train__early_stopping": {}, "train__max_steps": 16}
    first = train(settings(data, tmp_path / "run", **gains))
    assert first["best"]["step"] == 16
    ruined = {**gains, "train__max_steps": 22, "dense__optimizer__lr": 30.0, "embedding__optimizer__lr": 30.0}
    summary = train(settings(data, tmp_path / "run", **ruined))
    assert summary["best"] == first["best"]
    assert without_times([summary["test"]]) == without_times([first["test"]])


def test_best_weights_that_were_not_kept_are_reported(data: Path, tmp_path: Path) -> None:
    last = {**FIRST_IS_BEST, "train__finish": "last"}
    train(settings(data, tmp_path / "run", **last, train__max_steps=16))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        MesetaError, match=r"needs the checkpoint of step 6, the best so far, which was not kept; set train\.fin"
    ):
        train(settings(data, tmp_path / "run", **FIRST_IS_BEST))
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    assert train(settings(data, tmp_path / "run", **last))["num_steps"] == 22


def test_a_deleted_best_checkpoint_is_reported(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000000006")
    with pytest.raises(MesetaError, match=r"ended with the weights of step 6, but .* does not exist"):
        load_trained(tmp_path / "run", "test", World.single())


def test_a_run_restored_from_a_mirror_ends_identically(data: Path, tmp_path: Path) -> None:
    mirror = {"train__max_steps": 11, "checkpoint__mirror": f"file://{tmp_path / 'mirror'}"}
    document = settings(data, tmp_path / "run", **FIRST_IS_BEST, **mirror)
    first = train(document)
    shutil.rmtree(tmp_path / "run")
    again = train(document)
    assert without_times([again["test"], again["valid"]]) == without_times([first["test"], first["valid"]])
    assert again["checkpoint"] == first["checkpoint"]


OTHER_RATES = {"dense__optimizer__lr": 0.02, "embedding__optimizer__lr": 0.2}


def test_other_rates_after_an_early_stop(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stops = {"train__epochs": 3, "train__eval_every_steps": 4}
    early = {"train__early_stopping": {"patience": 2, "min_delta": 10.0}}
    train(settings(data, tmp_path / "run", **stops, **early))
    config, lines = (tmp_path / "run/config.yaml").read_text(), metrics(tmp_path / "run")
    for _ in range(2):  # the note appears each time, since no step has used the new rates
        capsys.readouterr()
        assert train(settings(data, tmp_path / "run", **stops, **early, **OTHER_RATES))["num_steps"] == 12
        [note] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
        assert "stopped early at step 12: 2 evaluations in a row were no better than ne" in note
        assert "its weights, metrics and config are kept" in note and "dense.optimizer.lr was 0.01, is 0.02" in note
        assert "with --force; to continue with them, raise train.early_stopping.patience" in note
        assert (tmp_path / "run/config.yaml").read_text() == config and metrics(tmp_path / "run") == lines
    patient = {"train__early_stopping": {"patience": 3, "min_delta": 10.0}}
    summary = train(settings(data, tmp_path / "run", **stops, **patient, **OTHER_RATES))
    assert "the run continues with changed settings" in capsys.readouterr().err
    assert summary["num_steps"] == 16
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["dense"]["optimizer"]["lr"] == 0.02


def test_other_rates_after_the_last_step(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=3))
    capsys.readouterr()
    train(settings(tiny, tmp_path / "run", train__max_steps=3, schedule={"warmup_steps": 2}))
    [note] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert "has done its 3 steps" in note and "to continue with them, raise train.max_steps" in note
    assert "dense.schedule.warmup_steps was 0, is 2; embedding.schedule.warmup_steps was 0, is 2" in note


def test_a_schedule_that_moves_to_the_top_is_no_change(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"kind": "cosine", "warmup_steps": 2}
    parts = {"embedding__schedule": schedule, "dense__schedule": schedule}
    train(settings(tiny, tmp_path / "run", train__max_steps=3, **parts))
    train(settings(tiny, tmp_path / "run", train__max_steps=5, schedule=schedule))
    train(settings(tiny, tmp_path / "once", train__max_steps=5, **parts))
    assert "continues with changed settings" not in capsys.readouterr().err
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["schedule"]["kind"] == "cosine" and written["dense"]["schedule"] is None


def test_the_test_split_is_evaluated_only_on_request(data: Path, ended: Path, tmp_path: Path) -> None:
    document = settings(data, tmp_path / "run", **FIRST_IS_BEST)
    config = RunConfig.model_validate(document)
    left = Trainer(config, World.current(), with_test=False).run()
    assert "test" not in left and left["valid"]["step"] == 6
    assert "test" not in {split for _, split in evaluations(tmp_path / "run")}
    asked, oracle = train(document), summary_of(ended)
    assert without_times([asked["test"], asked["valid"]]) == without_times([oracle["test"], oracle["valid"]])


def test_without_valid_the_test_split_is_always_evaluated(tiny: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(settings(tiny, tmp_path / "run", train__max_steps=2))
    assert Trainer(config, World.current(), with_test=False).run()["test"]["step"] == 2
