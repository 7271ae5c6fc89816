"""Importance of features on several ranks with sharded tables, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World
from meseta.config import load_config
from meseta.train.importance import measure_importance
from meseta.train.setup.build import make_reader
from meseta.train.trained_model import load_trained
from sampling import sample
from small_run import final_checksum, settings, tiny_with_valid, train

from .pool import RankPool
from .test_training import ROW_WISE


def measured(run_dir: str) -> dict[str, Any]:
    """Return the importances of a run. Every rank of a pool can import it."""
    trained = load_trained(Path(run_dir), "valid", World.current())
    config = load_config(Path(run_dir) / "config.yaml")
    training = make_reader(config, trained.reader.dataset, "train", trained.world, in_order=True)
    summary = measure_importance(trained.model, trained.reader, trained.world, seed=3, training_reader=training)
    assert summary is not None
    return summary.to_dict()


@pytest.mark.parametrize("size", sample([2, 3], k=1, seed=1))
def test_ranks_agree_with_one(ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path, size: int) -> None:
    data, run = tiny_with_valid(tiny), tmp_path / "run"
    [first, *others] = ranks(size).run(train, settings(data, run, plan=ROW_WISE, report__importance=True))
    assert all(other["importance"] == first["importance"] for other in others)
    one, several = measured(str(run)), ranks(size).run(measured, str(run))
    assert [entry["name"] for entry in first["importance"]["features"]] == [entry["name"] for entry in one["features"]]
    assert one["logistic_logloss"] is not None
    for other in several:
        assert other == several[0]
        assert other["logistic_logloss"] == one["logistic_logloss"]
        for feature, alone in zip(other["features"], one["features"], strict=True):
            assert feature["logloss"] == pytest.approx(alone["logloss"], abs=1e-7)
            assert feature["high"] == pytest.approx(alone["high"], abs=1e-7)
    off = settings(data, tmp_path / "off", plan=ROW_WISE)
    ranks(size).run(train, off)
    assert final_checksum(tmp_path / "off") == final_checksum(run)
