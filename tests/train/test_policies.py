"""Training with excluded rows and with padded batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.data.read.selection import calibration_shift
from meseta.spec import MesetaError
from meseta.train.evaluate import evaluate
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from small_run import criteo_shaped_data, metrics, settings, tiny_data, train


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.getbasetemp() / "data")


@pytest.fixture(scope="module")
def criteo_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return criteo_shaped_data(tmp_path_factory.getbasetemp() / "data")


def test_padded_batches_train_the_same_model(tiny: Path, tmp_path: Path) -> None:
    """Both epochs end with a short batch. Adam must not move rows that no sample names."""
    common = {
        "embedding__dtype": "float64",
        "embedding__optimizer__name": "adam",
        "train__epochs": 2,
        "train__log_every_steps": 1,
        "train__batch_size": 250,
    }
    summaries = {end: train(settings(tiny, tmp_path / end, data__last_batch=end, **common)) for end in ("keep", "pad")}
    kept, padded = summaries["keep"], summaries["pad"]
    assert kept["num_samples"] == padded["num_samples"]
    lines = [[line for line in metrics(tmp_path / end) if line["kind"] == "train"] for end in ("keep", "pad")]
    for one, other in zip(*lines, strict=True):
        assert one["num_samples"] == other["num_samples"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-10)
    trained = [load_trained(tmp_path / end, "test", World.single()) for end in ("keep", "pad")]
    for shards in zip(*(one.model.embeddings.shards for one in trained), strict=True):
        np.testing.assert_allclose(*(shard.weight.numpy() for shard in shards), atol=1e-10)


def test_predictions_are_calibrated_after_sampling_negatives(criteo_shaped: Path, tmp_path: Path) -> None:
    """The mean prediction equals the mean label of the whole test split. Without the correction the ratio would be
    above 2."""
    keep = 0.2
    common: dict[str, Any] = {"train__epochs": 2, "model__name": "logistic_regression"}
    summary = train(settings(criteo_shaped, tmp_path / "run", data__negative_keep=keep, **common))
    assert summary["excluded_rows"]["negatives"] == pytest.approx(0.75 * (1 - keep) * 4000, rel=0.1)
    assert summary["num_samples"] == 2 * (4000 - summary["excluded_rows"]["negatives"])
    assert summary["test"]["num_samples"] == 2000
    assert summary["test"]["calibration"] == pytest.approx(1.0, abs=0.12)
    trained = load_trained(tmp_path / "run", "test", World.single())
    evaluated = evaluate(trained.model, trained.reader, trained.world, logit_shift=trained.logit_shift).to_dict()
    assert evaluated["calibration"] == summary["test"]["calibration"]
    trained = load_trained(tmp_path / "run", "test", World.single())
    assert evaluate(trained.model, trained.reader, trained.world).to_dict()["calibration"] > 2
    predictions = []
    for name, shift in (("plain", 0.0), ("shifted", trained.logit_shift)):
        trained = load_trained(tmp_path / "run", "test", World.single(), ignore_filter=True)
        write_predictions(trained.model, trained.reader, trained.world, tmp_path / name, logit_shift=shift)
        predictions.append(pq.read_table(tmp_path / name)["prediction"].to_numpy().astype(np.float64))
    p, q = predictions
    np.testing.assert_allclose(q, p / (p + (1 - p) / keep), rtol=1e-5)  # He et al. 2014, section 6.3


@pytest.mark.parametrize("w", [1.0, 0.5, 0.01])
def test_the_shift_follows_the_published_formula(w: float) -> None:
    for p in (0.001, 0.3, 0.9):
        q = p / (p + (1 - p) / w)
        assert math.log(q / (1 - q)) == pytest.approx(math.log(p / (1 - p)) + calibration_shift(w))


def test_a_filter_holds_for_training_and_evaluation_but_not_for_predictions(tiny: Path, tmp_path: Path) -> None:
    condition = "age >= 45 and city != 'city0'"
    summary = train(settings(tiny, tmp_path / "run", data__filter=condition))
    everything = train(settings(tiny, tmp_path / "all"))
    left_out = summary["excluded_rows"]
    assert left_out["negatives"] == 0
    assert summary["num_samples"] + left_out["by_filter"] == everything["num_samples"]
    assert 0 < summary["test"]["num_samples"] < everything["test"]["num_samples"]
    trained = load_trained(tmp_path / "run", "test", World.single())
    assert trained.reader.num_rows == summary["test"]["num_samples"]
    trained = load_trained(tmp_path / "run", "test", World.single(), ignore_filter=True)
    assert trained.reader.num_rows == everything["test"]["num_samples"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__filter": "age < 0"}, "no rows to train on: data.filter and data.negative_keep exclude all rows"),
        ({"data__last_batch": "drop", "train__batch_size": 5000}, "no rows .* 'drop' excludes all of its"),
        ({"data__filter": "agee < 3"}, "there is no column 'agee'; did you mean 'age'"),
    ],
)
def test_nothing_to_train_on(tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        train(settings(tiny, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
