"""Averages of the predictions of several runs equal a numpy computation from the predictions of each run."""

from __future__ import annotations

import json
import weakref
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

import meseta
from bad_input.commands import run_here
from meseta.comm import World
from meseta.data.prepare import PrepareOptions, prepare
from meseta.train import trained_model
from meseta.train.averages.runs import Averaged, PredictionSums
from meseta.train.trained_model import load_for_raw_rows, load_trained, open_for_raw_rows
from small_run import settings, train

NUM_ROWS = 331
RUNS = ("one", "sampled", "other")
"""Runs of the module's folder. The last one was trained on another dataset of the same files."""


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("averages")
    source = tiny.parent / "tiny.parquet"
    prepare(
        PrepareOptions(
            sources=[str(source)], out=out / "data", vocabulary=True, min_count=2, seed=5,
            sparse=["user", "item", "city"], ignore=["tags"],
        )
    )  # fmt: skip
    train(settings(tiny, out / "one", train__max_steps=6))
    train(settings(tiny, out / "sampled", train__max_steps=9, seed=1, data__negative_keep=0.5))
    train(settings(out / "data", out / "other", train__max_steps=5, seed=2, train__eval_batch_size=64))
    table = pq.read_table(source).slice(100, NUM_ROWS)
    pq.write_table(table, out / "rows.parquet")
    pq.write_table(table.drop_columns("label"), out / "bare.parquet")
    return out


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits))


@cache
def logits_of(run_dir: Path) -> NDArray[np.float64]:
    trained = load_for_raw_rows(run_dir, [str(run_dir.with_name("rows.parquet"))], World.single())
    return np.concatenate([scores for scores, _ in trained.predict()]).astype(np.float64)


def mean_of(folder: Path, averaged: Averaged) -> NDArray[np.float64]:
    """Return the mean prediction of each row, computed with numpy from the logits of each run."""
    logits = [logits_of(folder / run) for run in RUNS]
    return sigmoid(np.mean(logits, axis=0)) if averaged == "logit" else np.mean([*map(sigmoid, logits)], axis=0)


@pytest.mark.parametrize("averaged", ["probability", pytest.param("logit", marks=pytest.mark.soak)])
def test_averages_equal_numpy(folder: Path, tmp_path: Path, averaged: Averaged) -> None:
    expected = mean_of(folder, averaged)
    first, *more = (folder / run for run in RUNS)
    with open_for_raw_rows(first, [str(folder / "rows.parquet")], more_runs=more, averaged=averaged) as trained:
        logits = np.concatenate([scores for scores, _ in trained.predict()])
    assert trained.step == 6 and [other.step for other in trained.others] == [9, 5]
    np.testing.assert_allclose(sigmoid(logits), expected, rtol=1e-13, atol=0)

    out, source = tmp_path / "p.parquet", folder / "bare.parquet"
    ended = run_here("predict", first, *more, "--data", source, "--out", out, "--keys", "user", "--average", averaged)
    assert ended.code == 0, ended.err
    assert f"as encoded by {folder / 'other'}:\n  values not seen in training" in ended.out
    predictions, rows = pq.read_table(out), pq.read_table(folder / "rows.parquet")
    assert np.array_equal(predictions["prediction"].to_numpy(), expected.astype(np.float32))
    assert predictions["user"].equals(rows["user"]) and predictions["row"].to_pylist() == list(range(NUM_ROWS))
    ended = run_here("eval", first, *more, "--data", folder / "rows.parquet", "--average", averaged)
    assert ended.code == 0, ended.err
    line, labels = json.loads(ended.out), rows["label"].to_numpy()
    assert line["steps"] == [6, 9, 5] and line["average"] == averaged and line["num_samples"] == NUM_ROWS
    assert line["auc"] == pytest.approx(roc_auc_score(labels, expected), abs=1e-12)
    assert line["logloss"] == pytest.approx(log_loss(labels, expected), abs=1e-12)


def test_runs_of_one_dataset_are_averaged_on_its_split(folder: Path, tiny: Path, tmp_path: Path) -> None:
    singles = [load_trained(folder / run, "test", World.single()) for run in RUNS[:2]]
    batches = [[*trained.predict()] for trained in singles]
    logits = [np.concatenate([scores for scores, _ in parts]).astype(np.float64) for parts in batches]
    expected, labels = np.mean([*map(sigmoid, logits)], axis=0), [b.label.numpy() for _, b in batches[0]]
    runs = [folder / run for run in RUNS[:2]]
    ended = run_here("eval", *runs, "--by", "city")
    assert ended.code == 0, ended.err
    line = json.loads(ended.out)
    assert line["split"] == "test" and line["segments"]["city"]
    assert line["logloss"] == pytest.approx(log_loss(np.concatenate(labels), expected), abs=1e-12)
    assert run_here("predict", *runs, "--out", tmp_path / "p.parquet", "--data", tiny).code == 0
    predictions = pq.read_table(tmp_path / "p.parquet")["prediction"].to_numpy()
    assert np.array_equal(predictions, expected.astype(np.float32))


def test_python_predicts_and_evaluates_the_average(folder: Path) -> None:
    run, others = meseta.open_run(folder / "one"), [meseta.open_run(folder / "sampled"), folder / "other"]
    rows = pq.read_table(folder / "rows.parquet")
    expected = mean_of(folder, "logit")
    predictions = run.predict(rows, more_runs=others, average="logit")
    assert np.array_equal(predictions["prediction"].to_numpy(), expected.astype(np.float32))
    metrics = run.evaluate(rows, more_runs=others, average="logit")
    assert metrics["logloss"] == pytest.approx(log_loss(rows["label"].to_numpy(), expected), abs=1e-12)


def test_one_model_is_in_memory_at_a_time(folder: Path, tmp_path: Path) -> None:
    made: list[weakref.ref[Any]] = []
    make = trained_model.make_sharded_model

    def counted(*arguments: Any) -> Any:
        assert all(reference() is None for reference in made)
        model = make(*arguments)
        made.append(weakref.ref(model))
        return model

    with mock.patch.object(trained_model, "make_sharded_model", counted):
        ended = run_here("predict", *(folder / run for run in RUNS), "--data", folder / "bare.parquet",
                         "--out", tmp_path / "p.csv")  # fmt: skip
    assert ended.code == 0 and len(made) == len(RUNS), ended.err


def test_refused_averages(folder: Path, tiny: Path, tmp_path: Path) -> None:
    table = pq.read_table(tiny.parent / "tiny.parquet").rename_columns(
        ["bought", *pq.read_schema(tiny.parent / "tiny.parquet").names[1:]]
    )
    pq.write_table(table, tmp_path / "bought.parquet")
    prepare(PrepareOptions(sources=[str(tmp_path / "bought.parquet")], out=tmp_path / "data", label=["bought"],
                           sparse=["user"], ignore=["item", "city", "tags"]))  # fmt: skip
    train(settings(tmp_path / "data", tmp_path / "bought", train__max_steps=1))
    bare = pq.read_table(folder / "bare.parquet").slice(0, 250)
    place = bare.column_names.index("user")
    bare = bare.set_column(place, "user", pa.array(["nobody"] * 250))
    pq.write_table(pa.concat_tables([bare] * 4), tmp_path / "unseen.parquet")
    one, other = folder / "one", folder / "other"
    rows, unlabeled = ["--data", folder / "rows.parquet"], ["--data", folder / "bare.parquet"]
    for command, runs, options, message in (
        ("eval", [one, tmp_path / "bought"], rows, "bought' predicts 'bought', but run"),
        ("predict", [one, other], [], "on other data than those of"),
        ("eval", [one, other], [], "pass raw files with --data, which each run encodes itself"),
        ("eval", [one, one], rows, "is given twice"),
        ("eval", [one, other], [*rows, "--average", "mean"], "no such kind 'mean'; "),
        ("eval", [one, other], [*rows, "--split", "train"], "raw files have no split 'train'"),
        ("eval", [one], ["--encoding", "utf-8"], "--encoding needs raw files in --data"),
        ("eval", [one, other], unlabeled, "new rows: they have no labels"),
        ("eval", [one, folder / "none"], rows, "none"),
        (
            "predict",
            [one, other],
            ["--data", tmp_path / "unseen.parquet"],
            "other': predict: 100.00% of the 1,000 values",
        ),
    ):
        ended = run_here(command, *runs, *options, *(["--out", tmp_path / "p.csv"] if command == "predict" else []))
        assert ended.code == 1 and len(ended.errors) == 1 and message in ended.errors[0], ended.err
    assert not list(tmp_path.glob("*p.csv*"))


@pytest.mark.parametrize("averaged", ["probability", "logit"])
def test_extreme_logits_of_two_labels(averaged: Averaged) -> None:
    """Probabilities that round to 0 or 1 keep an exact logit."""
    draw = np.random.default_rng(3)
    runs = draw.normal(size=(3, 40, 2)) * np.array([1.0, 1000.0])
    with PredictionSums(averaged) as sums:
        for run in runs[1:]:
            sums.add((part, None) for part in np.split(run, [7, 30]))
        averages = np.concatenate([sums.average(part) for part in np.split(runs[0], [7, 30])])
    exact = runs.astype(np.longdouble)
    if averaged == "logit":
        expected = exact.mean(axis=0)
    else:
        expected = np.log(np.mean(1 / (1 + np.exp(-exact)), axis=0)) - np.log(np.mean(1 / (1 + np.exp(exact)), axis=0))
    np.testing.assert_allclose(averages, expected.astype(np.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("averaged", ["probability", "logit"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_not_hidden(averaged: Averaged, bad: float) -> None:
    with PredictionSums(averaged) as sums:
        sums.add([(np.array([0.5, bad, 0.5], np.float32), None)])
        averages = sums.average(np.array([0.5, 0.5, bad], np.float32))
    assert averages[0] == 0.5 and np.isnan(averages[1:]).all()
