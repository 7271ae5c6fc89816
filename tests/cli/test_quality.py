"""`meseta quality`: a suite from its file to its tables, interrupted on the way, and suites that are refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meseta.cli.jobs import CommandJob, FinishedJob, function_step, last_output_line, run_jobs
from meseta.cli.launch import StopSignals
from meseta.cli.main import main
from meseta.cli.quality import _SuiteRunner
from meseta.errors import check_number
from meseta.system.processes import fork
from meseta.train.quality.study import SuiteRun
from small_run import tiny_with_valid
from source_tree import ROOT

Run = Callable[..., tuple[int, str, str]]
SAMPLE = ROOT / "examples/quality/sample.yaml"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_suite_that_was_interrupted_goes_on_and_two_copies_differ_nowhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "out", list[str]()
    tell = _SuiteRunner._report_run

    def tell_and_stop(self: _SuiteRunner, done_run: SuiteRun, done: FinishedJob) -> None:
        tell(self, done_run, done)
        trained.append(done.job.name)
        if len(trained) == 3:  # the first copy of a seed; the other is under way
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(_SuiteRunner, "_report_run", tell_and_stop)
    arguments = ("quality", SAMPLE, "--out", out, "--workers", 2)
    code, _, err = run(*arguments)
    assert code == 143 and "the same command resumes from there" in err
    for scored in out.glob("orders-S1/*/seed-1.json"):  # as if it had ended before their weights had gone
        (scored.with_suffix("") / "checkpoints").mkdir(exist_ok=True)
    code, text, err = run(*arguments)
    assert code == 0, err
    assert len(trained) == len(set(trained)) >= 5  # done once; the other may have ended just before it was told to
    num_told = len(trained)
    assert "[6/6]" in text and f"report: {out / 'quality.html'}" in text
    [ground] = json.loads((out / "quality.json").read_text())["grounds"]
    assert [one["over_seeds"] for one in ground["differences"]] == [
        {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    ] * 3
    assert {one["better"] for one in ground["differences"]} == {None}
    _check_runs(out / "orders-S1", ground)
    assert run(*arguments)[0] == 0 and len(trained) == num_told


def _check_runs(folder: Path, ground: dict[str, Any]) -> None:
    """Trials have not read test, which the chosen have read once, and nothing large is left."""
    for name, config in ground["configs"].items():
        texts = [file.read_text() for file in (folder / name).glob("*/metrics.jsonl")]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        assert {line["split"] for line in lines if line["kind"] == "eval"} == {"valid"}
        assert list(config["seeds"]) == ["1", "2"] and list(config["chosen"]) == ["dense.optimizer.lr"]
        assert all(0.5 < one["ne"] < 1.5 and 0 < one["regret"] < 0.5 for one in config["seeds"].values())
    assert not [*folder.glob("*/*/checkpoints"), *folder.glob("world-*/")]


def suite_of(folder: Path, **document: Any) -> Path:
    base = {"model": {"name": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}, "train": {"max_steps": 2}}
    (folder / "base.yaml").write_text(yaml.safe_dump({**base, "data": {"dir": "nowhere"}}))
    whole = {"base": "base.yaml", "trials": 0, "seeds": 2, "configs": {"a": {}, "b": {}}, **document}
    (folder / "suite.yaml").write_text(yaml.safe_dump(whole))
    return folder / "suite.yaml"


def test_a_dataset_has_no_regret_and_its_rows_are_drawn_anew(run: Run, tiny: Path, tmp_path: Path) -> None:
    other = {"set": {"model.name": "fm", "embedding.init.scale": 0.5}}
    suite = suite_of(
        tmp_path, datasets=[{"dir": str(tiny_with_valid(tiny))}], configs={"a": {}, "fm": other}, resamples=50
    )
    code, text, err = run("quality", suite, "--out", tmp_path / "out")
    assert code == 0, err
    assert "| regret" not in text and "95% over rows" in text
    [ground] = json.loads((tmp_path / "out/quality.json").read_text())["grounds"]
    assert [one["metric"] for one in ground["differences"]] == ["ne", "auc"]
    for one in ground["differences"]:
        assert one["over_rows"]["mean"] == pytest.approx(np.mean([*one["by_seed"].values()]), rel=1e-9)
        assert one["over_rows"]["low"] < one["over_rows"]["mean"] < one["over_rows"]["high"]


def test_a_config_that_needs_other_data_is_refused_before_anything_is_trained(run: Run, tmp_path: Path) -> None:
    suite = suite_of(
        tmp_path,
        worlds=[{"world": "pairs", "rows": 1000, "scale": 0.001}],
        configs={"a": {}, "b": {"set": {"metrics.segments": ["city"]}}},
    )
    code, out, err = run("quality", suite, "--out", tmp_path / "out")
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and out == "" and "config 'b' does not fit 'pairs S=1': " in line and "'city'" in line
    assert not [*(tmp_path / "out").glob("*/*/seed-1")]


def test_a_suite_that_is_wrong_is_one_line(run: Run, tmp_path: Path) -> None:
    for document, words in (
        ({"worlds": [{"world": "order"}]}, "unknown world 'order'; did you mean 'orders'?"),
        ({"worlds": [{"world": "orders", "strength": 2}]}, "key 'worlds.0.strength'"),
    ):
        code, out, err = run("quality", suite_of(tmp_path, **document), "--out", tmp_path / "out")
        assert code == 1 and out == "" and words in err and len(err.splitlines()) == 1
    assert run("quality", tmp_path / "nothing.yaml", "--out", tmp_path / "out")[2].startswith("error: suite '")


def test_a_training_that_fails_is_told_and_tried_again(run: Run, tiny: Path, tmp_path: Path) -> None:
    broken = {"set": {"dense.optimizer.lr": 1e30, "dense.optimizer.name": "sgd"}}  # diverges in its first steps
    suite = suite_of(
        tmp_path,
        datasets=[{"dir": str(tiny_with_valid(tiny))}],
        configs={"a": {}, "b": broken},
        seeds=1,
        resamples=2,
        set={"train.batch_size": 64, "train.max_steps": 6},
    )
    for _ in range(2):
        code, out, err = run("quality", suite, "--out", tmp_path / "out")
        assert code == 1 and "tiny-with-valid, b, seed 1: failed with exit code 1: " in out
        assert "1 training runs failed" in err and "the same command retries them" in err
    assert out.count("[2/2]") == 1 and "[1/2]" not in out  # the other one was kept
    assert "## Failed runs" in (tmp_path / "out/quality.md").read_text()


def test_jobs_run_some_at_a_time_and_stop_where_one_of_their_steps_fails(tmp_path: Path) -> None:
    def job(name: str, *codes: int) -> CommandJob:
        steps = [lambda out, code=code: fork(lambda: _say_and_leave(name, code), name, stdout_fd=out) for code in codes]
        return CommandJob(name, tmp_path / f"{name}.log", steps)

    jobs = [job("good", 0, 0), job("bad", 0, 3, 0), job("last", 0)]
    ended = {done.job.name: done.exit_code for done in run_jobs(jobs, 2, StopSignals())}
    assert ended == {"good": 0, "bad": 3, "last": 0}
    said = {name: (tmp_path / f"{name}.log").read_text().split() for name in ended}
    assert said == {"good": ["good", "good"], "bad": ["bad", "bad"], "last": ["last"]}
    assert last_output_line(tmp_path / "bad.log") == "bad"


def _run_command(*arguments: str) -> None:
    """Run `meseta`, whose standard error is the log, not what pytest has put there."""
    sys.stderr, sys.argv = os.fdopen(2, "w"), ["meseta", *arguments]
    main()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (partial(check_number, "a", "b", "c"), "a: b must be a finite number, got 'c'"),
        (partial(_run_command, "config", "zzz"), "config: there is no key 'zzz'; `meseta config` lists all"),
    ],
)
def test_the_error_of_a_job_is_its_text_alone(work: Callable[[], object], text: str, tmp_path: Path) -> None:
    [done] = run_jobs([CommandJob("failing", tmp_path / "log", [function_step(work, "failing")])], 1, StopSignals())
    assert done.exit_code == 1 and last_output_line(tmp_path / "log") == text


def _say_and_leave(name: str, code: int) -> None:
    os.write(1, f"{name}\n".encode())
    os._exit(code)
