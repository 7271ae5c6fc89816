"""Tests of `meseta sweep`: ranked trainings in separate processes, failed and finished ones."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from meseta.cli import sweep as command
from meseta.cli.launch import StopSignals
from meseta.comm import World
from meseta.config import load_config
from meseta.spec import MesetaError
from meseta.train.trainer import Trainer
from small_run import settings, tiny_with_valid, write_config

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "unused", train__max_steps=3))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Run trainings in this process, and return their run_dirs. Seed 5 fails and seed 6 is stopped."""
    runs: list[Path] = []

    def here(arguments: Sequence[str], log: Path, calls: StopSignals) -> int:
        with_test = arguments[-1] != "--no-test"
        _, path, *overrides, nproc, _ = arguments if with_test else arguments[:-1]
        assert nproc == "--nproc"
        config = load_config(path, overrides)
        runs.append(config.run_dir)
        try:
            if config.seed == 5:
                raise MesetaError("five is not liked")
            if config.seed == 6:
                os.kill(os.getpid(), signal.SIGTERM)
                return 143
            Trainer(config, World.current(), with_test=with_test).run()
        except MesetaError as error:
            log.write_text(f"step 1\nerror: {error}\n")
            return 1
        return 0

    monkeypatch.setattr(command, "_run_training", here)
    return runs


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_grid_in_separate_processes(run: Run, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    code, text, _ = run("sweep", config, "seed=[4,5]", "train.max_steps=1", "--out", out, "--metric", "auc")
    assert code == 0
    table = rows(out)
    aucs = [json.loads((out / row["trial"] / "summary.json").read_text())["test"]["auc"] for row in table]
    assert [float(row["auc"]) for row in table] == aucs == sorted(aucs, reverse=True)
    assert {row["seed"] for row in table} == {"4", "5"}
    assert "note: the test split decided which trial is the best, so its figures are flattered" in text
    assert (out / "comparison.html").exists() and f"report: {out / 'comparison.html'}" in text


def test_a_failed_trial_is_reported_and_finished_ones_are_kept(
    run: Run, config: Path, tmp_path: Path, started: list[Path]
) -> None:
    out = tmp_path / "sweep"
    arguments = ("sweep", config, "seed=[4,5,7]", "--out", out)
    code, text, _ = run(*arguments)
    assert code == 0 and len(started) == 3
    first, second, third, fourth = text.splitlines()[:4]
    assert first.split() == ["trial", "seed", "ne"] and second.endswith("  best so far")
    assert third.split(maxsplit=2) == ["2/3", "5", "failed with exit code 1: five is not liked"]
    assert fourth.split()[:2] == ["3/3", "7"]
    section = (out / "comparison.html").read_text().partition('<section id="trials">')[2].partition("</section>")[0]
    listed = re.findall(">([^<]+)<", section)[1:]
    assert listed[:4] == ["trial", "seed", "test NE", "problem"] and listed[5] == " selected"
    assert [name for name in listed if name.startswith("trial-")] == [row["trial"] for row in rows(out)]
    at = listed.index("trial-001")
    assert listed[at : at + 4] == ["trial-001", "5", "–", "failed with exit code 1: five is not liked"]
    assert [row["seed"] for row in rows(out)][2] == "5" and "five is not liked" in rows(out)[2]["problem"]
    code, text, _ = run(*arguments)
    assert code == 0 and [path.name for path in started[3:]] == ["trial-001"]
    assert text.count("(kept)") == 2


def test_trials_are_ranked_by_valid_and_the_best_alone_reads_test(
    run: Run, tiny: Path, tmp_path: Path, started: list[Path]
) -> None:
    config = write_config(
        tmp_path / "c.yaml", settings(tiny_with_valid(tiny), tmp_path / "unused", train__max_steps=10)
    )
    out = tmp_path / "sweep"
    arguments = ("sweep", config, "dense.optimizer.lr=[1e-5,0.02,1e-4]", "--out", out)
    code, text, _ = run(*arguments)
    assert code == 0 and "flattered" not in text
    assert [path.name for path in started] == ["trial-000", "trial-001", "trial-002", "trial-001"]
    table = rows(out)
    summaries = {path.name: json.loads((path / "summary.json").read_text()) for path in started}
    assert [name for name, summary in summaries.items() if "test" in summary] == ["trial-001"]
    assert [row["trial"] for row in table] == sorted(summaries, key=lambda name: summaries[name]["valid"]["ne"])
    assert [float(row["ne"]) for row in table] == [summaries[row["trial"]]["valid"]["ne"] for row in table]
    assert float(table[0]["test auc"]) == summaries["trial-001"]["test"]["auc"]
    assert {row["test auc"] for row in table[1:]} == {""}
    lines = [json.loads(line) for path in started for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line.get("split") == "test"} == {10}
    page = (out / "comparison.html").read_text()
    assert "Metrics are computed on the split valid" in page and "trial-001 on test, at step 10:" in page
    assert f"{summaries['trial-000']['valid']['auc']:.4f}" in page
    assert run(*arguments)[0] == 0 and len(started) == 4  # all trials are finished


def test_a_stopped_sweep_resumes(run: Run, config: Path, tmp_path: Path, started: list[Path]) -> None:
    out = tmp_path / "sweep"
    code, _, err = run("sweep", config, "seed=[4,6,7]", "--out", out)
    assert code == 143 and "interrupted in trial 2;" in err and len(started) == 2
    assert len(rows(out)) == 3


def test_random_trials_can_be_extended(run: Run, config: Path, tmp_path: Path, started: list[Path]) -> None:
    common = ("sweep", config, "dense.optimizer.lr=loguniform(1e-4,1e-1)", "--random", "--out", tmp_path / "s")
    assert run(*common, "--trials", 1)[0] == 0
    first = rows(tmp_path / "s")
    assert run(*common, "--trials", 2)[0] == 0 and len(started) == 2
    assert {row["dense.optimizer.lr"] for row in first} < {row["dense.optimizer.lr"] for row in rows(tmp_path / "s")}


def test_errors_are_one_line(run: Run, config: Path, tmp_path: Path, started: list[Path]) -> None:
    for arguments, words in (
        (("seed=[1,2]", "--random"), "need each other"),
        (("seed=[1,2]", "--trials", 3), "need each other"),
        (("sed=[1,2]",), "did you mean 'seed'"),
        (("seed=uniform(0,1)",), "--random --trials N"),
    ):
        code, out, err = run("sweep", config, *arguments, "--out", tmp_path / "sweep")
        assert code == 1 and out == "" and words in err and len(err.splitlines()) == 1
    code, _, err = run("sweep", config, "seed=[5]", "--out", tmp_path / "sweep")
    assert code == 1 and "no trial has finished" in err
