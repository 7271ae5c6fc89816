"""A model that pools the rows of a feature itself trains as the model with pooled embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.checkpoint import newest
from meseta.comm import World
from meseta.spec import MesetaError
from meseta.train.interop.dense_export import export_dense
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from small_run import metrics, settings, train

from .pool import RankPool

Ranks = Callable[[int], RankPool]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if line["kind"] == "train"]


def document(tiny: Path, run: Path, cls: str, pooling: str, **changes: Any) -> dict[str, Any]:
    tables = {name: {"pooling": pooling} for name in ("user", "city")}
    model = {"name": f"own_models:{cls}", "embedding_dim": 4}
    keys = {"model": model, "embedding__tables": tables, "embedding__dtype": "float64"}
    return settings(tiny, run, **keys, train__max_steps=5, train__log_every_steps=1, **changes)


def predictions(run: Path, out: Path) -> list[str]:
    trained = load_trained(run, "test", World.single())
    write_predictions(trained.model, trained.reader, World.single(), out)
    return out.read_text().splitlines()


def test_a_model_that_sums_rows_itself_trains_as_with_pooling(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    pooled = train(document(tiny, tmp_path / "pooled", "Plain", "sum"))
    rows = {"parts": {"train__accumulate_steps": 3}, "ahead": {"pipeline__overlap": "auto"}}
    for name, changes in rows.items():
        summary = train(document(tiny, tmp_path / name, "AddsRows", "none", **changes))
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "pooled"), rtol=0, atol=1e-10)
        assert summary["test"]["logloss"] == pytest.approx(pooled["test"]["logloss"], abs=1e-9)
    [two, _] = ranks(2).run(train, document(tiny, tmp_path / "two", "AddsRows", "none", train__accumulate_steps=2))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "pooled"), rtol=0, atol=1e-10)
    assert two["test"]["logloss"] == pytest.approx(pooled["test"]["logloss"], abs=1e-9)
    files = [predictions(tmp_path / name, tmp_path / f"{name}.csv") for name in ("pooled", "two")]
    numbers = [np.array([[float(cell) for cell in line.split(",")] for line in lines[1:]]) for lines in files]
    np.testing.assert_allclose(*numbers, rtol=0, atol=1e-6)


def test_unpooled_features_are_rejected_where_unsupported(tiny: Path, tmp_path: Path) -> None:
    train(document(tiny, tmp_path / "run", "AddsRows", "none"))
    path = newest(tmp_path / "run/checkpoints")
    assert path is not None
    with pytest.raises(
        MesetaError, match="export: AddsRows has reads_embeddings, but only pooled embeddings are supported"
    ):
        export_dense(path, tmp_path / "dense", "torch-export")
    tags = {"embedding__tables": {"tags": {"pooling": "none"}}}
    with pytest.raises(
        MesetaError,
        match=r"embedding\.tables\.tags\.pooling must not be 'none', because the ids of the feature have weights",
    ):
        train(settings(tiny, tmp_path / "weights", **tags))
    for name in ("own_models:Plain", "dlrm"):
        with pytest.raises(MesetaError, match="feature 'user' has pooling 'none', but the model needs one vector"):
            train({**document(tiny, tmp_path / "other", "Plain", "none"), "model": {"name": name, "embedding_dim": 4}})
