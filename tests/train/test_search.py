"""Search of settings within a budget: its decisions, evidence, budget and resume."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import with_values
from meseta.data import Dataset
from meseta.train.importance import paired_difference
from meseta.train.search.candidates import DROPOUT, merge, scaled_rate
from meseta.train.search.residuals import centered_residuals, cut, pair_statistic
from meseta.train.search.search import search_settings
from meseta.train.search.trials import Trials
from meseta.train.trainer import Trainer
from small_run import final_checksum, metrics, without_times
from train.searches import NOISE, SHORT, make_config, read_trials, write_log

NEW_KEYS = ("data.without", "train.search_budget", "train.clip_norm", "report.baseline")
"""Keys that the config of an earlier version does not have."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_log(tmp_path_factory.mktemp("search"))


@pytest.fixture(scope="module")
def searched(log: Dataset) -> tuple[RunConfig, Path]:
    """Return the config that a search has chosen, and the folder of its run."""
    run_dir = log.dir.parent / "whole"
    config, free = make_config(log, run_dir, **SHORT)
    return search_settings(config, log, free, World.single()), run_dir


def test_noise_is_left_out_and_useful_columns_stay(searched: tuple[RunConfig, Path]) -> None:
    config, run_dir = searched
    assert set(config.data.without) == set(NOISE)
    record = read_trials(run_dir)
    assert any("noise_id" in decision for decision in record["decisions"])
    spent = float(re.search(r"spent (\S+) of 2.5 trainings, (\S+) for evidence", " ".join(record["decisions"]))[1])
    assert record["trials"][0]["cost"] == 1 and 1 < sum(trial["cost"] for trial in record["trials"]) < spent <= 2.5
    assert not (run_dir / "trials").exists()
    chosen = record["trials"][record["selected"]]["settings"]
    stored = with_values(config, chosen)
    assert stored == config  # The record has all values of the decisions.


def test_the_winner_continues_and_equals_one_training(searched: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, run_dir = searched
    steps_before = max(line["step"] for line in metrics(run_dir))
    summary = Trainer(config, World.single()).run()
    assert summary["num_steps"] >= steps_before > 0
    alone = config.model_copy(update={"run_dir": tmp_path / "alone"})
    assert Trainer(alone, World.single()).run()["valid"]["auc"] == summary["valid"]["auc"]
    assert final_checksum(run_dir) == final_checksum(tmp_path / "alone")
    assert without_times(metrics(run_dir)) == without_times(metrics(tmp_path / "alone"))


def test_a_begun_run_keeps_its_decisions(searched: tuple[RunConfig, Path], log: Dataset) -> None:
    config, run_dir = searched
    again, free = make_config(log, run_dir, train={**SHORT["train"], "search_budget": 0})
    decided = search_settings(again, log, free, World.single())
    assert decided.model_copy(update={"train": config.train}) == config


@pytest.mark.soak
def test_a_run_of_an_earlier_version_resumes_unchanged(log: Dataset, tmp_path: Path) -> None:
    settings = {"train": {"epochs": 2, "batch_size": 256, "search_budget": 0}}
    config, _ = make_config(log, tmp_path / "whole", **settings)
    Trainer(config, World.single()).run()
    config, _ = make_config(log, tmp_path / "begun", **settings)
    Trainer(config, World.single()).run_trial(1)
    path = tmp_path / "begun" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    for section, key in (name.split(".") for name in NEW_KEYS):
        del stored[section][key]
    path.write_text(yaml.safe_dump(stored))
    config, free = make_config(log, tmp_path / "begun", train={"epochs": 2, "batch_size": 256})
    config = search_settings(config, log, free, World.single())
    Trainer(config, World.single()).run()
    assert final_checksum(tmp_path / "begun") == final_checksum(tmp_path / "whole")
    assert without_times(metrics(tmp_path / "begun")) == without_times(metrics(tmp_path / "whole"))
    assert not (tmp_path / "begun" / "trials").exists() and not (tmp_path / "begun" / "trials.json").exists()


@pytest.mark.soak
def test_the_last_trial_pauses_at_the_end_of_the_budget(log: Dataset, tmp_path: Path) -> None:
    config, _ = make_config(log, tmp_path / "run", train={"epochs": 4, "batch_size": 256, "search_budget": 1.8})
    trials = Trials(config, log, World.single())
    assert trials.train({}, None).result.num_samples == 4 * log.splits["train"].num_rows
    trial = trials.train({DROPOUT: 0.0}, 1)
    assert trials.spent == pytest.approx(1.25) == 1.8 - trials.budget_left
    trials.train_to_end(trial, 0)
    assert len(trial.result.evaluations) == 3 and not trial.result.is_finished and trials.spent == pytest.approx(1.75)
    trials.collect_evidence("rows", trial, lambda path: (path.name, log.splits["train"].num_rows))
    assert trials.evidence_cost == pytest.approx(0.25 / 3)


def test_keys_of_the_config_are_not_searched(log: Dataset, tmp_path: Path) -> None:
    sections = {"model": {"name": "deepfm", "dropout": 0.1}, "embedding": {"optimizer": {"lr": 0.02}}}
    _, free = make_config(log, tmp_path, data={"dir": str(log.dir), "without": ["weak"]}, **sections)
    assert not {"data.without", "model.dropout", "embedding.optimizer.lr"} & set(free)
    _, adam = make_config(log, tmp_path, embedding={"optimizer": {"name": "adam"}})
    assert not any(key.startswith("embedding.optimizer") for key in adam)


def test_few_validation_rows_are_not_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write_log(tmp_path, rows=600)
    config, free = make_config(dataset, tmp_path / "run")
    assert search_settings(config, dataset, free, World.single()) is config
    num_valid = dataset.splits["valid"].num_rows
    assert f"no search of settings: {num_valid} validation rows are fewer than 200" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", range(3))
def test_pair_statistic_equals_all_pairs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids, residuals = draw.integers(0, 9, 60), draw.normal(0, 1, 60)
    same = (ids[:, None] == ids) & ~np.eye(60, dtype=bool)
    products = np.where(same, np.outer(residuals, residuals), 0.0)
    expected = products.sum() / math.sqrt(2 * (products**2).sum())
    assert pair_statistic(ids, np.arange(60), residuals) == pytest.approx(expected, rel=1e-12)
    assert pair_statistic(np.arange(60), np.arange(60), residuals) == 0.0


def test_pair_statistic_is_standard_normal_without_association() -> None:
    draw = np.random.default_rng(0)
    values = [pair_statistic(draw.integers(0, 300, 900), np.arange(900), draw.normal(0, 1, 900)) for _ in range(400)]
    assert abs(np.mean(values)) < 4 / 20 and 0.85 < np.std(values) < 1.15


def test_few_buckets_find_weak_smooth_effects() -> None:
    draw, rows = np.random.default_rng(0), np.arange(8000)
    statistics = []
    for _ in range(20):
        values = draw.normal(0, 1, rows.size)
        residuals = draw.normal(0, 1, rows.size) + 0.08 * (np.abs(values) - (2 / math.pi) ** 0.5)
        statistics.append([pair_statistic(cut(values, number), rows, residuals) for number in (5, 20)])
    few, many = np.mean(statistics, axis=0)
    assert few > 3 > many
    assert cut(np.array([5.0, 1.0, 2.0, 4.0, 3.0, 1.0]), 2).tolist() == [1, 0, 0, 1, 1, 0]


def test_residuals_of_a_biased_model_are_not_associated_with_noise() -> None:
    draw = np.random.default_rng(0)
    labels, logits = (draw.random(20_000) < 0.3).astype(np.float64), np.full(20_000, -0.4)
    weights = draw.uniform(0.5, 2, labels.size)
    losses, probabilities = np.logaddexp(0, logits) - labels * logits, 1 / (1 + np.exp(-logits))
    expected = weights * (labels - probabilities - weights @ (labels - probabilities) / weights.sum())
    residuals = centered_residuals(labels, losses, weights)
    assert residuals == pytest.approx(expected, abs=1e-12)
    statistics = [
        pair_statistic(draw.integers(0, 7, labels.size), np.arange(labels.size), residuals) for _ in range(20)
    ]
    assert (
        max(statistics) < 4
        and pair_statistic(draw.integers(0, 7, labels.size), np.arange(labels.size), weights * (labels - probabilities))
        > 100
    )


def test_paired_difference_is_that_of_scipy() -> None:
    from scipy import stats

    values = np.random.default_rng(0).normal(0.1, 1, 500)
    paired = paired_difference(values, np.ones(500))
    low, high = stats.norm.interval(0.95, loc=values.mean(), scale=stats.sem(values))
    assert (paired.mean, paired.low, paired.high) == pytest.approx((values.mean(), low, high), rel=1e-6)


def test_grid_and_merged_changes() -> None:
    assert [scaled_rate(0.05, place) for place in (-2, -1, 0, 2)] == [0.005, 0.0158, 0.05, 0.5]
    assert merge([{"a": 1}, {"a": 2, "b": 3}, {"c": 4}]) == {"a": 1, "c": 4}
