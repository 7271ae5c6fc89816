"""Metrics during a run: over its lifetime, and by segment of the test split."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data import Batch
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError
from meseta.train.evaluate import predict
from meseta.train.metrics import compute_metrics
from meseta.train.running_metrics import RunningMetrics, StepPredictions
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer
from small_run import metrics, settings, train


def test_lifetime_metrics_are_means_over_all_lines(tmp_path: Path, tiny: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__epochs=3))
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    sizes = np.diff([0, *(line["num_samples"] for line in lines)])
    reader = Reader(tiny, "train", ReaderOptions(batch_size=1000))
    rate = np.concatenate([batch.label.numpy() for batch in reader.epoch()]).mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    loss = float(np.average([line["loss"] for line in lines], weights=sizes))
    life = lines[-1]["lifetime"]
    assert life["logloss"] == pytest.approx(loss, abs=1e-9)
    assert life["ne"] == pytest.approx(loss / entropy, abs=1e-6)  # over whole epochs the base rate is that of the split
    assert lines[0]["lifetime"]["logloss"] == pytest.approx(lines[0]["loss"], abs=1e-12)
    assert abs(lines[0]["lifetime"]["auc_binned"] - lines[0]["auc"]) <= lines[0]["lifetime"]["auc_error_bound"] + 1e-12


def test_a_checkpoint_holds_the_same_bytes_in_any_order_of_samples() -> None:
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(np.round(draw.normal(size=(200, 2)), 1))
    labels = torch.from_numpy(draw.integers(0, 2, (200, 2)).astype(np.float32))
    weights = torch.from_numpy((draw.integers(0, 3, 200) / 2).astype(np.float32))
    order = torch.from_numpy(draw.permutation(200))
    runs = [RunningMetrics(("click", "buy"), [1.0, 0.5], World.current()) for _ in range(3)]
    for run, places in zip(runs, (torch.arange(200), order), strict=False):
        for part in places.split(70):
            none = KeyedJaggedTensor.from_lists({"item": [[] for _ in part]})
            batch = Batch(dense=torch.empty(len(part), 0), sparse=none, label=labels[part], weight=weights[part])
            run.add([StepPredictions.start_copy(logits[part], batch)])
    kept = [run.get_tensors() for run in runs[:2]]
    columns = ("logits", "labels", "weights")
    assert {name for name in kept[0] if name.startswith("window")} == {
        f"window.{task}.{column}" for task in ("click", "buy") for column in columns
    }
    assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    runs[2].set_tensors(kept[0])
    lines = [run.compute_line(run.pop_windows()) for run in runs]
    assert lines[0] == lines[1] == lines[2]
    computed = [compute_metrics(logits[:, task], labels[:, task], weights) for task in range(2)]
    assert lines[0]["loss"] == pytest.approx(computed[0].logloss + 0.5 * computed[1].logloss, abs=1e-12)
    assert lines[0]["tasks"]["buy"]["auc"] == computed[1].auc and lines[0]["auc"] == computed[0].auc


def test_segments_of_the_test_split_are_measured_apart(tmp_path: Path, tiny: Path) -> None:
    document = settings(tiny, tmp_path / "run", metrics__segments=["city", "item"], metrics__max_segments=4)
    summary = train(document)
    world = World.current()
    trained = load_trained(tmp_path / "run", "test", world)
    logits, cities, labels = [], [], []
    for scores, batch in predict(trained.model, trained.reader, world):
        logits.append(scores)
        cities.append(batch.sparse["city"].values.numpy())
        labels.append(batch.label.numpy())
    scores, keys, truth = map(np.concatenate, (logits, cities, labels))
    segments = summary["test"]["segments"]
    assert list(segments) == ["city", "item"] and segments["city"][-1]["value"] is None
    assert sum(segment["num_samples"] for segment in segments["item"]) == len(truth)
    for segment in segments["city"][:-1]:
        rows = keys == segment["value"]
        assert segment["num_samples"] == rows.sum()
        assert segment["auc"] == pytest.approx(roc_auc_score(truth[rows], scores[rows]), abs=1e-6)
        probabilities = 1 / (1 + np.exp(-scores[rows].astype(np.float64)))
        assert segment["logloss"] == pytest.approx(log_loss(truth[rows], probabilities), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics__segments": ["citty"]}, "'citty' is not a sparse feature; did you mean 'city'?"),
        ({"metrics__segments": ["tags"]}, "cannot segment by 'tags': it is multi-valued"),
        ({"train__early_stopping": {"metric": "gauc"}}, "the data has no groups"),
        ({"train__early_stopping": {"task": "labl"}}, "'labl' is not a label; did you mean 'label'?"),
    ],
)
def test_unavailable_metrics_are_refused_before_the_first_step(
    tmp_path: Path, tiny: Path, changes: dict, words: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(MesetaError) as caught:
        Trainer(RunConfig.model_validate(settings(tiny, tmp_path / "run", **changes)), World.current())
    assert words in str(caught.value)
    assert set(threading.enumerate()) <= before  # although `caught` still refers to the trainer


def test_a_run_that_fails_leaves_no_thread(tiny: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    document = settings(tiny, tmp_path / "run", train__epochs=50, dense__optimizer={"name": "sgd", "lr": 1e30})
    with pytest.raises(MesetaError, match="the loss is") as caught:
        train(document)
    assert set(threading.enumerate()) <= before, caught
