"""Sweeps: search spaces, reopened folders and ranking of trials."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meseta.config import load_config
from meseta.spec import MesetaError
from meseta.telemetry.detail import CurrentDetail, Detail
from meseta.telemetry.metrics_file import EvalLine
from meseta.telemetry.summary import RunSummary
from meseta.train.sweep import (
    Choices,
    Range,
    Sweep,
    SweepTrial,
    TrialResult,
    TrialTable,
    grid_settings,
    open_sweep,
    parse_space,
    random_settings,
    rank_trials,
    write_tables,
)


def test_searched_and_fixed_settings() -> None:
    space, fixed = parse_space(
        [
            "dense.optimizer.lr=[0.001, 1e-2]",
            "seed=3",
            "model.top_mlp=[[64], [32, 8]]",
            "train.batch_size=randint(8,64)",
            "embedding.optimizer.lr=loguniform(1e-4, 1e-1)",
            "data.dir=a(b,c)",
        ]
    )
    assert space == {
        "dense.optimizer.lr": Choices((0.001, 0.01)),  # YAML 1.1 reads a number without a point as text
        "model.top_mlp": Choices(([64], [32, 8])),
        "train.batch_size": Range("randint", 8.0, 64.0),
        "embedding.optimizer.lr": Range("loguniform", 1e-4, 1e-1),
    }
    assert fixed == ["seed=3", "data.dir=a(b,c)"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["seed=3"], "no setting is searched"),
        (["seed=[]"], "has no values"),
        (["seed=[1,2"], "is not a list"),
        (["seed=[2020-01-01]"], "is not a list"),
        (["seed=[1]", "seed=[2]"], "occurs twice"),
        (["lr=uniform(a,b)"], "two numbers"),
        (["lr=uniform(2,1)"], "lower bound first"),
        (["lr=uniform(0,inf)"], "lower bound first"),
        (["lr=loguniform(0,1)"], "must be above 0"),
        (["n=randint(0.5,2)"], "integers as bounds"),
    ],
)
def test_invalid_spaces_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        parse_space(settings)
    assert words in str(caught.value)


def test_a_grid_has_every_combination_once() -> None:
    assert grid_settings({"a": Choices((1, 2)), "b": Choices(("x", "y", "z"))}) == [
        {"a": a, "b": b} for a in (1, 2) for b in "xyz"
    ]
    with pytest.raises(MesetaError, match="--random --trials"):
        grid_settings({"a": Range("uniform", 0.0, 1.0)})


def test_draws_are_of_the_range_and_of_the_seed_alone() -> None:
    space = {
        "c": Choices((1, 2, 3)),
        "u": Range("uniform", -1.0, 3.0),
        "l": Range("loguniform", 1e-4, 1e-1),
        "r": Range("randint", 2.0, 4.0),
    }
    trials = random_settings(space, 2000, 7)
    assert random_settings(space, 50, 7) == trials[:50] != random_settings(space, 50, 8)
    assert random_settings({"l": space["l"]}, 50, 7) == [{"l": trial["l"]} for trial in trials[:50]]
    counts = Counter(trial["r"] for trial in trials), Counter(trial["c"] for trial in trials)
    for count, values in zip(counts, ((2, 3, 4), (1, 2, 3)), strict=True):
        assert set(count) == set(values) and all(abs(n - 2000 / 3) < 120 for n in count.values())
    uniform = [(trial["u"] + 1) / 4 for trial in trials]
    log = [math.log10(trial["l"] / 1e-4) / 3 for trial in trials]
    for values in (uniform, log):  # the mean and the variance of a uniform variable on 0..1
        assert min(values) >= 0 and max(values) <= 1 and abs(sum(values) / 2000 - 0.5) < 0.03
        assert abs(sum((value - 0.5) ** 2 for value in values) / 2000 - 1 / 12) < 0.006


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("run_dir: runs/a\ndata: {dir: data/a}\n")
    return path


def test_a_folder_is_reopened_and_another_sweep_is_refused(config: Path, tmp_path: Path) -> None:
    out, two = tmp_path / "sweep", [{"seed": 1}, {"seed": 2}]
    plan = open_sweep(out, config, ["train.epochs=2"], two, allow_growth=False)
    settings = load_config(plan.config, plan.trials[1].overrides)
    assert (settings.seed, settings.train.epochs, settings.run_dir) == (2, 2, out / "trial-001")
    assert open_sweep(out, config, ["train.epochs=2"], two, allow_growth=False) == plan
    with pytest.raises(MesetaError, match="has a sweep with different config"):
        open_sweep(out, config, ["train.epochs=3"], two, allow_growth=False)
    with pytest.raises(MesetaError, match="has a sweep with different trials"):
        open_sweep(out, config, ["train.epochs=2"], two[:1], allow_growth=False)
    more = [*two, {"seed": 3}]
    assert len(open_sweep(out, config, ["train.epochs=2"], more, allow_growth=True).trials) == 3
    open_sweep(out, config, ["train.epochs=2"], two, allow_growth=True)
    assert json.loads((out / "sweep.json").read_text())["trials"] == more  # fewer trials do not remove the others
    (out / "sweep.json").write_text("{")
    with pytest.raises(MesetaError, match="cannot be read"):
        open_sweep(out, config, [], two, allow_growth=False)


def test_a_wrong_trial_is_named_before_files_are_written(config: Path, tmp_path: Path) -> None:
    for trial, words in (({"seed": -1}, "trial 1 (seed=-1)"), ({"sed": 1}, "did you mean 'seed'")):
        with pytest.raises(MesetaError) as caught:
            open_sweep(tmp_path / "sweep", config, [], [{"seed": 1}, trial], allow_growth=False)
        assert words in str(caught.value)
    assert not (tmp_path / "sweep").exists()


def result(number: int, **test: Any) -> TrialResult:
    summary = RunSummary(test=EvalLine(**test), num_steps=4) if test else None
    return TrialResult(SweepTrial(number, {"lr": number}, Path(f"trial-{number:03d}")), summary)


@pytest.mark.parametrize(("metric", "best"), [("ne", [1, 3]), ("auc", [1, 2])])
def test_the_table_of_trials_marks_the_best_so_far(
    capsys: pytest.CaptureFixture[str], metric: str, best: list[int]
) -> None:
    table = TrialTable([{"lr": 0.5, "model": [8, 8]}, *[{"lr": 0.25, "model": [8]}] * 4], metric)
    for number, value in enumerate((None, 0.5, 0.75, 0.25, math.nan)):
        table.print_row(number, value, *["stopped"] * (number == 0))
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == f"trial    lr   model  {metric:>7}"
    assert rows[0] == "  1/5   0.5  [8, 8]           stopped"
    assert rows[1] == "  2/5  0.25     [8]  0.50000  best so far"
    assert [number for number, row in enumerate(rows) if row.endswith("best so far")] == best


def test_a_quiet_command_prints_no_table_of_trials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CurrentDetail, "level", Detail.QUIET)
    TrialTable([{"lr": 0.5}], "ne").print_row(0, 0.5)
    assert capsys.readouterr().out == ""


def test_ranks_and_tables(tmp_path: Path) -> None:
    results = [result(0, ne=0.9, auc=0.7), result(1), result(2, ne=0.8, auc=0.6), result(3, ne=None, auc=0.8)]
    assert [r.trial.number for r in rank_trials(results, "ne")] == [2, 0, 1, 3]
    assert [r.trial.number for r in rank_trials(results, "auc")] == [3, 0, 2, 1]
    write_tables(Sweep(tmp_path, tmp_path / "config.yaml", ()), rank_trials(results, "ne"))
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["trial"], row["lr"], row["ne"]) for row in rows] == [
        ("1", "trial-002", "2", "0.8"),
        ("2", "trial-000", "0", "0.9"),
        ("3", "trial-001", "1", ""),
        ("4", "trial-003", "3", ""),
    ]
    assert (tmp_path / "sweep.md").read_text().splitlines()[2].startswith("| 1 | trial-002 | 2 | 0.80000 | 0.60000 |")
