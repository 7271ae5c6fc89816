"""Filtered rows and padded batches on two ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meseta.comm import World
from meseta.data import Reader, ReaderOptions
from meseta.train.trained_model import load_trained
from small_run import settings, train

from .pool import RankPool


def test_padded_batches_on_two_ranks_train_as_short_ones_on_one(
    ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path
) -> None:
    """The last batch has 20 to 22 rows, so that the second rank has only padding."""
    rows = {"filter": "age < 60", "negative_keep": 0.7}
    num_rows = Reader(tiny, "train", ReaderOptions(batch_size=1, **rows)).num_rows
    batch_size = (num_rows - 20) // 3
    common = {"embedding__dtype": "float64", "train__epochs": 2, "train__batch_size": batch_size}
    chosen = {**common, **{f"data__{name}": value for name, value in rows.items()}}
    one = train(settings(tiny, tmp_path / "kept", **chosen))
    assert (one["num_samples"], one["num_steps"]) == (2 * num_rows, 8)
    two = ranks(2).run(train, settings(tiny, tmp_path / "padded", data__last_batch="pad", **chosen))[0]
    for name in ("num_samples", "num_steps", "excluded_rows"):
        assert one[name] == two[name]
    assert one["test"]["logloss"] == pytest.approx(two["test"]["logloss"], abs=1e-10)
    assert one["test"]["calibration"] == pytest.approx(two["test"]["calibration"], abs=1e-9)
    kept, padded = (load_trained(tmp_path / name, "test", World.single()) for name in ("kept", "padded"))
    for shard, other in zip(kept.model.embeddings.shards, padded.model.embeddings.shards, strict=True):
        np.testing.assert_allclose(shard.weight.numpy(), other.weight.numpy(), atol=1e-10)
