"""Searches that are interrupted or killed, fail on a rank, or use more threads."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.processes import Command
from distributed.pool import RankPool
from meseta.comm import World
from meseta.config import validate_document
from meseta.data import Dataset
from meseta.spec import MesetaError
from meseta.train.search.search import search_settings
from meseta.train.search.trial_runs import TrialRuns
from meseta.train.trainer import Trainer
from small_run import environment, final_checksum
from train.searches import SHORT, make_config, read_trials, write_log

NUM_KILLS = 4


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_log(tmp_path_factory.mktemp("restarts"))


@pytest.mark.soak
def test_interrupted_searches_resume(log: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    take, stop_at = Trainer._run_step, math.inf

    def counted(self: Trainer, batch: Any) -> Any:
        steps.append(self.step)
        if len(steps) == stop_at:
            raise KeyboardInterrupt
        return take(self, batch)

    monkeypatch.setattr(Trainer, "_run_step", counted)
    config, free = make_config(log, tmp_path / "whole", **SHORT)
    whole = search_settings(config, log, free, World.single())
    num_steps, stop_at = len(steps), math.inf
    config, free = make_config(log, tmp_path / "interrupted", **SHORT)
    steps.clear()
    for share in (0.3, 0.8):
        stop_at = round(share * num_steps)
        with pytest.raises(KeyboardInterrupt):
            search_settings(config, log, free, World.single())
    stop_at = math.inf
    resumed = search_settings(config, log, free, World.single())
    assert resumed.model_copy(update={"run_dir": whole.run_dir}) == whole
    assert read_trials(tmp_path / "whole") == read_trials(tmp_path / "interrupted")
    assert len(steps) < 1.6 * num_steps


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def search_on_ranks(document: dict[str, Any], dataset_dir: str, free: list[str]) -> dict[str, Any]:
    config = search_settings(validate_document(document), Dataset.load(dataset_dir), free, World.current())
    return config.model_dump(mode="json")


@pytest.mark.soak
def test_two_ranks_decide_together(log: Dataset, tmp_path: Path, ranks: RankPool) -> None:
    config, free = make_config(log, tmp_path / "run", **SHORT)
    one, two = ranks.run(search_on_ranks, config.model_dump(mode="json"), str(log.dir), free)
    assert one == two and len(read_trials(tmp_path / "run")["trials"]) > 1


def train_and_fail(document: dict[str, Any], failing: list[int]) -> list[dict[str, Any]]:
    """Return the progress of a trial that fails on some ranks, and of the next one."""
    world, train = World.current(), Trainer.run_trial

    def run_trial(self: Trainer, num_evaluations: int | None = None) -> Any:
        result = train(self, num_evaluations)
        if self.config.model.dropout == 0.1 and world.rank in failing:
            raise MesetaError("planted failure")
        return result

    Trainer.run_trial = run_trial  # type: ignore[method-assign]
    try:
        runs = TrialRuns(validate_document(document), world)
        changes = ({"model.dropout": 0.1}, {"model.dropout": 0.3})
        return [runs.train(f"t{n}", change, 1, may_fail=True).to_dict() for n, change in enumerate(changes)]
    finally:
        Trainer.run_trial = train  # type: ignore[method-assign]


@pytest.mark.soak
@pytest.mark.parametrize("failing", [[1], [0, 1]])
def test_two_ranks_agree_that_a_trial_failed(log: Dataset, tmp_path: Path, ranks: RankPool, failing: list[int]) -> None:
    config, _ = make_config(log, tmp_path / "run", **SHORT)
    one, two = ranks.run(train_and_fail, config.model_dump(mode="json"), failing)
    assert one == two
    failed, good = one
    assert failed["problem"] == f"rank {failing[0]}: planted failure" and failed["is_finished"]
    assert not good.get("problem") and good["evaluations"]


def command(log: Dataset, folder: Path) -> list[object]:
    """Return the words of a command that searches settings for a raw log."""
    run_dir, file = folder / "run", log.dir.parent / "log.parquet"
    settings = ["train.epochs=2", "train.batch_size=256", "train.search_budget=2.5", "report.importance=false"]
    return ["train", "--data", file, f"run_dir={run_dir}", *settings]


def decisions(folder: Path) -> tuple[Any, ...]:
    """Return the decisions of a run, its stored config, and the checksum of its weights."""
    run_dir = folder / "run"
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    without_folders = {key: value for key, value in stored.items() if key not in ("run_dir", "num_threads", "data")}
    return read_trials(run_dir), without_folders, stored["data"]["without"], final_checksum(run_dir)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_decisions_do_not_depend_on_threads(log: Dataset, tmp_path: Path) -> None:
    for number in (1, 2):
        words = [sys.executable, "-m", "meseta.cli.main", *map(str, command(log, tmp_path / str(number)))]
        variables = {**environment(), "OMP_NUM_THREADS": str(number)}
        subprocess.run(words, check=True, env=variables, capture_output=True, cwd=tmp_path)
    assert decisions(tmp_path / "1") == decisions(tmp_path / "2")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_searches_continue_to_the_same_decisions(log: Dataset, tmp_path: Path) -> None:
    draw = random.Random(0)
    Command(tmp_path / "whole", *command(log, tmp_path / "whole")).succeed()
    results = tmp_path / "killed" / "run" / "trials" / "results"
    for number in range(NUM_KILLS):
        search = Command(tmp_path / "killed" / f"start-{number}", *command(log, tmp_path / "killed"))
        search.until(lambda n=number: results.exists() and len(os.listdir(results)) > n, "a result")
        time.sleep(draw.uniform(0, 1))
        search.send(9)
        search.wait()
    Command(tmp_path / "killed" / "last", *command(log, tmp_path / "killed")).succeed()
    assert decisions(tmp_path / "whole") == decisions(tmp_path / "killed")
