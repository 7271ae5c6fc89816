"""The parent's metrics on the new rows are those of `meseta predict`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data import Reader, ReaderOptions
from meseta.spec import MesetaError
from meseta.train.daily.new_ids import NewIds
from meseta.train.daily.test_first import evaluate_first, open_all_rows
from meseta.train.predictions import write_raw_predictions
from meseta.train.trained_model import load_for_raw_rows, load_trained
from small_run import settings
from train.daily.day_cases import Days, make_days
from train.daily.epoch_cases import hour_names, records


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Days:
    return make_days(tmp_path_factory.mktemp("days"))


def test_totals_and_groups_are_those_of_predictions(days: Days, tmp_path: Path) -> None:
    world = World.single()
    loaded = load_for_raw_rows(days.run, [str(days.raw_path)], world)
    predicted = write_raw_predictions(
        loaded.model, loaded.reader, world, tmp_path / "scores.parquet", loaded.correction
    )
    parent = load_trained(days.run, "test", world)
    new_ids = NewIds(days.grown, days.masks)
    reader = Reader(days.grown.with_times(), "train", ReaderOptions(batch_size=77))
    record = evaluate_first(parent.model, reader, world, new_ids, parent.correction)
    [expected] = predicted.metrics.values()
    del expected["reliability"]
    assert record.total.to_dict() == expected

    table = pq.read_table(tmp_path / "scores.parquet").to_pandas()
    like = pq.read_table([days.like.resolve_file(file.path) for file in days.like.splits["test"].files])
    bags = [
        [*(like[name][k].as_py() for name in ("user", "city")), *like["tags"][k].as_py()] for k in range(len(table))
    ]
    is_new = np.array([0 in ids for ids in bags])  # A value without a row in the parent.
    assert 0 < is_new.sum() < len(is_new)
    hours = np.array(hour_names(days.raw["ts"].to_numpy(), "%Y-%m-%dT%H"))
    groups = {"total": is_new | True, "new": is_new, "old": ~is_new, **{h: hours == h for h in sorted(set(hours))}}
    made = records(record)
    assert list(made) == list(groups)
    for name, places in groups.items():
        part = table[places]
        probabilities = part["prediction"].to_numpy().astype(np.float64)
        losses = -np.log(np.where(part["label"] == 1, probabilities, 1 - probabilities))
        assert (made[name].num_samples, made[name].num_positives) == (len(part), part["label"].sum())
        assert made[name].logloss == pytest.approx(losses.mean(), rel=1e-6)
        assert made[name].calibration == pytest.approx(probabilities.mean() / part["label"].mean(), rel=1e-6)
    assert (record.time_s or 0) > 0


def test_rows_without_labels(days: Days) -> None:
    parent = load_trained(days.run, "test", World.single())
    dataset = days.grown.model_copy(update={"has_labels": False})
    reader = Reader(dataset, "train", ReaderOptions(batch_size=77))
    with pytest.raises(MesetaError, match="has no labels"):
        evaluate_first(parent.model, reader, World.single(), NewIds(dataset, {}))


def test_all_rows_are_read_in_order_with_times(days: Days) -> None:
    document = settings(days.grown.dir, days.run, data__filter="price > 3", data__negative_keep=0.5)
    reader = open_all_rows(RunConfig.model_validate(document), days.grown, World.single())
    times = [time for batch in reader.epoch() for time in ([] if batch.time is None else batch.time.tolist())]
    assert times == days.raw["ts"].tolist()
