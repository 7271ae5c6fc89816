"""Permutation importance at the end of a run, against predictions of rows that were permuted as Python lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.sparse import KeyedJaggedTensor
from meseta.train import importance
from meseta.train.evaluate import evaluation_mode, score_batch
from meseta.train.importance import measure_importance
from meseta.train.trained_model import load_trained
from small_run import final_checksum, settings, table_checksums, tiny_with_valid, train


@pytest.fixture(scope="module")
def run_dir(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("importance") / "run"
    train(settings(tiny_with_valid(tiny), out, train__epochs=3, seed=5, report__importance=True))
    return out


def lists(batches: list[Batch]) -> dict[str, list[Any]]:
    """Return the columns of batches as lists: bags of (id, weight), dense values and labels."""
    columns: dict[str, list[Any]] = {}
    for batch in batches:
        for key in batch.sparse.keys:
            bags = batch.sparse[key]
            assert bags.weights is not None
            pairs = list(zip(bags.values.tolist(), bags.weights.tolist(), strict=True))
            ends = bags.lengths.cumsum(0).tolist()
            columns.setdefault(key, []).extend(pairs[end - n : end] for end, n in zip(ends, bags.lengths, strict=True))
        for place, name in enumerate(("price", "age")):
            columns.setdefault(name, []).extend(batch.dense[:, place].tolist())
        columns.setdefault("label", []).extend(batch.label.tolist())
    return columns


def losses(model: Any, columns: dict[str, list[Any]], keys: tuple[str, ...]) -> np.ndarray:
    pairs = [pair for key in keys for bag in columns[key] for pair in bag]
    batch = Batch(
        dense=torch.tensor([columns["price"], columns["age"]]).T.contiguous(),
        sparse=KeyedJaggedTensor(
            keys=keys,
            values=torch.tensor([value for value, _ in pairs]),
            lengths=torch.tensor([len(bag) for key in keys for bag in columns[key]]),
            weights=torch.tensor([weight for _, weight in pairs]),
        ),
        label=torch.tensor(columns["label"]),
    )
    with torch.no_grad(), evaluation_mode(model):
        logits = score_batch(model, batch, World.single(), OutOfRangeIds()).astype(np.float64)
    labels = np.array(columns["label"])
    return np.asarray(-labels * np.log(1 / (1 + np.exp(-logits))) - (1 - labels) * np.log(1 / (1 + np.exp(logits))))


def test_importances_are_those_of_permuted_lists(run_dir: Path) -> None:
    trained = load_trained(run_dir, "valid", World.single())
    batches = list(trained.reader.epoch())
    trained.reader.set_state({**trained.reader.get_state(), "epoch": 0, "row": 0})
    measured = measure_importance(trained.model, trained.reader, World.single(), seed=5)
    assert measured is not None
    columns, keys = lists(batches), batches[0].sparse.keys
    base, num_rows = losses(trained.model, columns, keys), len(columns["label"])
    rate = np.mean(columns["label"])
    assert (measured.split, measured.label, measured.num_rows) == ("valid", "label", num_rows)
    assert measured.num_permutations == importance.MAX_PERMUTATIONS
    assert measured.logloss == pytest.approx(base.mean(), rel=1e-6)
    assert measured.constant_logloss == pytest.approx(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))
    assert [feature.name for feature in measured.features] == ["price", "age", *keys]
    assert [feature.kind for feature in measured.features] == ["dense"] * 2 + ["sparse"] * 4
    for place, feature in enumerate(measured.features):
        changed = np.zeros(num_rows)
        for repeat in range(measured.num_permutations):
            order = np.random.default_rng([5, place, repeat]).permutation(num_rows)
            permuted = {**columns, feature.name: [columns[feature.name][i] for i in order]}
            changed += losses(trained.model, permuted, keys) / measured.num_permutations
        half = 1.96 * np.std(changed - base, ddof=1) / num_rows**0.5
        mean = np.mean(changed - base)
        assert feature.logloss == pytest.approx(mean, abs=1e-6)
        assert feature.low == pytest.approx(mean - half, abs=1e-5)
        assert feature.high == pytest.approx(mean + half, abs=1e-5)
    assert max(feature.logloss for feature in measured.features) > 0.001


def test_a_run_is_the_same_without(run_dir: Path, tiny: Path, tmp_path: Path) -> None:
    off = train(settings(tiny_with_valid(tiny), tmp_path / "off", train__epochs=3, seed=5))
    on = load_trained(run_dir, "valid", World.single())
    assert "importance" not in off
    assert final_checksum(tmp_path / "off") == final_checksum(run_dir)
    assert table_checksums(tmp_path / "off") == table_checksums(run_dir)
    again = measure_importance(on.model, on.reader, World.single(), seed=5)
    other = measure_importance(on.model, on.reader, World.single(), seed=6)
    assert again is not None and other is not None
    assert again != other


def test_rows_are_evenly_spaced_parts_of_the_split(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 150 rows takes the first batch of 130 rows and a part of the second of three."""
    monkeypatch.setattr(importance, "MAX_ROWS", 150)
    monkeypatch.setattr(importance, "MIN_ROWS", 1)
    trained = load_trained(run_dir, "valid", World.single())
    batches = list(trained.reader.epoch())
    measured = measure_importance(trained.model, trained.reader, World.single(), seed=5)
    assert measured is not None and measured.num_rows == 150
    base = losses(trained.model, lists(batches), batches[0].sparse.keys)
    assert measured.logloss == pytest.approx(base[:150].mean(), rel=1e-6)


def test_rows_without_weight_do_not_count(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_trained(run_dir, "valid", World.single())
    batches = list(trained.reader.epoch())
    weights = np.random.default_rng(0).integers(0, 3, trained.reader.num_rows).astype(np.float64)
    monkeypatch.setattr(importance, "first_label_weights", lambda rows: weights)
    measured = measure_importance(trained.model, trained.reader, World.single(), seed=5)
    assert measured is not None
    base = losses(trained.model, lists(batches), batches[0].sparse.keys)
    assert measured.logloss == pytest.approx(np.average(base, weights=weights), rel=1e-6)
    monkeypatch.setattr(importance, "first_label_weights", lambda rows: 0 * weights)
    assert measure_importance(trained.model, trained.reader, World.single(), seed=5) is None
