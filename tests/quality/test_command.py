"""`python tools/quality`: suites from the file to the page, interruption, failures and invalid arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meseta.spec import MesetaError
from small_run import tiny_with_valid
from source_tree import ROOT
from tools.quality.jobs import Job, Step, StopSignals, last_output_line, run_jobs
from tools.quality.runner import SuiteRunner
from tools.quality.study import SuiteRun

Run = Callable[..., tuple[int, str, str]]
SAMPLE = ROOT / "examples/quality/sample.yaml"


def write_suite(folder: Path, **document: Any) -> Path:
    base = {"model": {"name": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}, "train": {"max_steps": 2}}
    (folder / "base.yaml").write_text(yaml.safe_dump({**base, "data": {"dir": "nowhere"}}))
    suite = {"base": "base.yaml", "trials": 0, "seeds": 2, "configs": {"a": {}, "b": {}}, **document}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    return folder / "suite.yaml"


@pytest.mark.soak
def test_suite_on_a_world_from_file_to_page(run: Run, tmp_path: Path) -> None:
    formula = {"model.name": "tools.quality.formula:LearnedFormula", "model.embedding_dim": 5}
    suite = write_suite(
        tmp_path,
        worlds=[{"world": "pairs", "rows": 1000, "scale": 0.001}],
        configs={"a": {}, "formula": {"set": {**formula, "model.options": {"world": "pairs"}}}},
        seeds=1,
    )
    code, text, err = run(suite, "--out", tmp_path / "out")
    assert code == 0, err
    assert "note: 'tools.quality.formula:LearnedFormula' runs the code of module 'tools.quality.formula'" in err
    assert "[2/2]" in text and f"report: {tmp_path / 'out/quality.html'}" in text
    [dataset] = json.loads((tmp_path / "out/quality.json").read_text())["grounds"]
    assert {one["metric"] for one in dataset["differences"]} == {"regret", "ne", "auc"}
    assert {one["better"] for one in dataset["differences"]} == {None}
    _check_runs(tmp_path / "out/pairs-S1", dataset, seeds=["1"])


@pytest.mark.soak
def test_interrupted_suite_resumes_and_copies_do_not_differ(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "out", list[str]()
    report_run = SuiteRunner.report_run

    def report_and_stop(self: SuiteRunner, done_run: SuiteRun, done: Job) -> None:
        report_run(self, done_run, done)
        trained.append(done.name)
        if len(trained) == 3:  # The run of the other copy on this seed has not finished.
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SuiteRunner, "report_run", report_and_stop)
    arguments = (SAMPLE, "--out", out, "--workers", 2)
    code, _, err = run(*arguments)
    assert code == 143 and "the same command resumes from there" in err
    for scored in out.glob("orders-S1/*/seed-1.json"):  # As if the command had stopped before it deleted the weights.
        (scored.with_suffix("") / "checkpoints").mkdir(exist_ok=True)
    code, text, err = run(*arguments)
    assert code == 0, err
    # A run that was interrupted may have finished just before the signal.
    assert len(trained) == len(set(trained)) >= 5
    num_trained = len(trained)
    assert "[6/6]" in text and f"report: {out / 'quality.html'}" in text
    [dataset] = json.loads((out / "quality.json").read_text())["grounds"]
    assert [one["over_seeds"] for one in dataset["differences"]] == [
        {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    ] * 3
    _check_runs(out / "orders-S1", dataset, seeds=["1", "2"])
    assert all(list(config["chosen"]) == ["dense.optimizer.lr"] for config in dataset["configs"].values())
    assert run(*arguments)[0] == 0 and len(trained) == num_trained


def _check_runs(folder: Path, dataset: dict[str, Any], seeds: list[str]) -> None:
    """Check that training evaluated only the validation split, and that rows and weights were deleted."""
    for name, config in dataset["configs"].items():
        texts = [file.read_text() for file in (folder / name).glob("*/metrics.jsonl")]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        assert {line["split"] for line in lines if line["kind"] == "eval"} == {"valid"}
        assert list(config["seeds"]) == seeds
        assert all(0.5 < one["ne"] < 1.5 and 0 < one["regret"] < 0.5 for one in config["seeds"].values())
    assert not [*folder.glob("*/*/checkpoints"), *folder.glob("world-*/"), *folder.glob(".tmp-*")]


def test_suite_on_a_dataset_from_file_to_page(run: Run, tiny: Path, tmp_path: Path) -> None:
    other = {"set": {"model.name": "fm", "embedding.init.scale": 0.5}}
    suite = write_suite(
        tmp_path, datasets=[{"dir": str(tiny_with_valid(tiny))}], configs={"a": {}, "fm": other}, seeds=1, resamples=50
    )
    code, text, err = run(suite, "--out", tmp_path / "out")
    assert code == 0, err
    assert "| regret" not in text and "95% over rows" in text and "[2/2]" in text
    assert f"report: {tmp_path / 'out/quality.html'}" in text
    [dataset] = json.loads((tmp_path / "out/quality.json").read_text())["grounds"]
    assert [one["metric"] for one in dataset["differences"]] == ["ne", "auc"]
    for one in dataset["differences"]:
        assert one["over_rows"]["mean"] == pytest.approx(np.mean([*one["by_seed"].values()]), rel=1e-9)
        assert one["over_rows"]["low"] < one["over_rows"]["mean"] < one["over_rows"]["high"]


@pytest.mark.soak
def test_configs_are_checked_before_training(run: Run, tmp_path: Path) -> None:
    suite = write_suite(
        tmp_path,
        worlds=[{"world": "pairs", "rows": 1000, "scale": 0.001}],
        configs={"a": {}, "b": {"set": {"metrics.segments": ["city"]}}},
    )
    code, out, err = run(suite, "--out", tmp_path / "out")
    [line] = err.splitlines()
    assert code == 1 and out == "" and "config 'b' does not fit 'pairs S=1': " in line and "'city'" in line
    assert not [*(tmp_path / "out").glob("*/*/seed-1")]


def test_invalid_suites_and_arguments_are_rejected(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for document, words in (
        ({"worlds": [{"world": "order"}]}, "unknown world 'order'; did you mean 'orders'?"),
        ({"worlds": [{"world": "orders", "strength": 2}]}, "key 'worlds.0.strength'"),
    ):
        code, out, err = run(write_suite(tmp_path, **document), "--out", tmp_path / "out")
        assert code == 1 and out == "" and words in err and len(err.splitlines()) == 1
    assert run(tmp_path / "nothing.yaml", "--out", tmp_path / "out")[2].startswith("error: suite '")
    with pytest.raises(SystemExit) as stopped:
        run(SAMPLE, "--out", tmp_path / "out", "--workers", 0)
    assert stopped.value.code == 2 and "it must be a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.soak
def test_failed_training_is_reported_and_retried(run: Run, tiny: Path, tmp_path: Path) -> None:
    broken = {"set": {"dense.optimizer.lr": 1e30, "dense.optimizer.name": "sgd"}}  # Diverges in its first steps.
    suite = write_suite(
        tmp_path,
        datasets=[{"dir": str(tiny_with_valid(tiny))}],
        configs={"a": {}, "b": broken},
        seeds=1,
        resamples=2,
        set={"train.batch_size": 64, "train.max_steps": 6},
    )
    for _ in range(2):
        code, out, err = run(suite, "--out", tmp_path / "out")
        assert code == 1 and "tiny-with-valid, b, seed 1: failed with exit code 1: " in out
        assert "1 training runs failed" in err and "the same command retries them" in err
    assert out.count("[2/2]") == 1 and "[1/2]" not in out  # The other run is not repeated.
    assert "## Failed runs" in (tmp_path / "out/quality.md").read_text()


@pytest.mark.soak
def test_jobs_run_simultaneously_and_stop_at_a_failed_step(run: Run, tmp_path: Path) -> None:
    def job(name: str, *codes: int) -> Job:
        return Job(name, tmp_path / f"{name}.log", [partial(_print_and_exit, name, code) for code in codes])

    jobs = [job("good", 0, 0), job("bad", 0, 3, 0), job("last", 0)]
    codes = {done.name: done.exit_code for done in run_jobs(jobs, 2, StopSignals())}
    assert codes == {"good": 0, "bad": 3, "last": 0}
    printed = {name: (tmp_path / f"{name}.log").read_text().split() for name in codes}
    assert printed == {"good": ["good", "good"], "bad": ["bad", "bad"], "last": ["last"]}
    assert last_output_line(tmp_path / "bad.log") == "bad"


def _print_and_exit(name: str, code: int) -> None:
    os.write(1, f"{name}\n".encode())
    os._exit(code)


def _fail() -> None:
    raise MesetaError("a: b must be a finite number")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_fail, "a: b must be a finite number"),
        (["config", "zzz"], "config: there is no key 'zzz'; `meseta config` lists all"),
    ],
)
def test_last_output_line_of_a_failed_job_is_its_error(step: Step, text: str, run: Run, tmp_path: Path) -> None:
    [done] = run_jobs([Job("failing", tmp_path / "log", [step])], 1, StopSignals())
    assert done.exit_code == 1 and last_output_line(tmp_path / "log") == text


@pytest.mark.soak
def test_command_from_the_root_of_the_repository(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/quality", SAMPLE, "--out", tmp_path / "out"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
