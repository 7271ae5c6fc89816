"""Figures that a run writes on its way: over its whole life, and by segment of the test split."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.reader import Reader, ReaderOptions
from meseta.spec import MesetaError
from meseta.train.evaluate import predict
from meseta.train.trained import load_trained
from meseta.train.trainer import Trainer
from small_run import metrics, settings, train


def test_the_life_of_a_run_is_the_sum_of_its_lines(tmp_path: Path, tiny: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__epochs=3))
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    sizes = np.diff([0, *(line["num_samples"] for line in lines)])
    reader = Reader(tiny, "train", ReaderOptions(batch_size=1000))
    rate = np.concatenate([batch.label.numpy() for batch in reader.epoch()]).mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    loss = float(np.average([line["loss"] for line in lines], weights=sizes))
    life = lines[-1]["lifetime"]
    assert life["logloss"] == pytest.approx(loss, abs=1e-9)
    assert life["ne"] == pytest.approx(loss / entropy, abs=1e-6)  # whole epochs: their base rate is that of the split
    assert lines[0]["lifetime"]["logloss"] == pytest.approx(lines[0]["loss"], abs=1e-12)
    assert abs(lines[0]["lifetime"]["auc_binned"] - lines[0]["auc"]) <= lines[0]["lifetime"]["auc_error_bound"] + 1e-12


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
        ({"metrics__segments": ["citty"]}, "'citty' is no sparse feature; did you mean 'city'?"),
        ({"metrics__segments": ["tags"]}, "a sample has several ids of 'tags'"),
        ({"train__early_stopping": {"metric": "gauc"}}, "the data have no groups"),
        ({"train__early_stopping": {"task": "labl"}}, "'labl' is no label; did you mean 'label'?"),
    ],
)
def test_what_no_evaluation_has_is_refused_before_the_first_step(
    tmp_path: Path, tiny: Path, changes: dict, words: str
) -> None:
    with pytest.raises(MesetaError) as caught:
        Trainer(RunConfig.model_validate(settings(tiny, tmp_path / "run", **changes)), World.current())
    assert words in str(caught.value)
