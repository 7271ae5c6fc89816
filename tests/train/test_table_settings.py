"""Tables with an individual width and features with an individual pooling, in every model and through a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.checkpoint import newest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.train.interop.dense_export import load_dense_part
from meseta.train.setup.meta_model import make_meta_model, step_peak_bytes
from meseta.train.setup.specs import make_specs
from meseta.train.trained_model import load_trained
from small_run import settings, train

TABLES = {"user": {"embedding_dim": 6}, "tags": {"pooling": "mean", "optimizer": {"lr": 0.05}}}
TAKE_ANY = {"dlrm_dcnv2", "mmoe", "dcnv2", "gdcn", "finalmlp"}
"""Models that concatenate embeddings, and so take any width."""


@pytest.mark.parametrize("name", [*MODEL_NAMES, "own_models:Plain", "dlrm without products"])
def test_a_table_width_is_accepted_or_refused_by_name(tiny: Path, tmp_path: Path, name: str) -> None:
    product = {"model__interaction": "none"} if "without" in name else {}
    document = settings(tiny, tmp_path, model__name=name.partition(" ")[0], embedding__tables=TABLES, **product)
    config, dataset = RunConfig.model_validate(document), Dataset.load(tiny)
    try:
        tables, features = make_specs(config, dataset)
        outline = make_meta_model(config, dataset, EmbeddingBagCollection(tables, features))
    except MesetaError as error:
        assert name not in TAKE_ANY and ("'user'" in str(error) or "tables.user." in str(error))
        assert "embedding_dim" in str(error) and "\n" not in str(error)
        return
    assert name in TAKE_ANY or name not in MODEL_NAMES
    dims = {table.name: table.embedding_dim for table in tables}
    assert dims == {name: 6 if name == "user" else 4 for name in dims}
    assert {f.name: f.pooling for f in features} == {f.name: "mean" if f.name == "tags" else "sum" for f in features}
    assert step_peak_bytes(outline, 64, len(dataset.dense)) >= 2 * 64 * 4 * sum(dims.values())


def test_every_model_accepts_a_pooling_per_feature(tiny: Path, tmp_path: Path) -> None:
    for name in set(MODEL_NAMES) - {"logistic_regression"}:
        tables: dict[str, Any] = {"user": {"embedding_dim": 4}, "tags": {"pooling": "mean"}}
        config = RunConfig.model_validate(settings(tiny, tmp_path, model__name=name, embedding__tables=tables))
        specs = make_specs(config, Dataset.load(tiny))
        assert {table.embedding_dim for table in specs[0]} == {config.model.table_width()}
        make_meta_model(config, Dataset.load(tiny), EmbeddingBagCollection(*specs))


def test_table_settings_of_a_run(tiny: Path, tmp_path: Path) -> None:
    common = {"model__name": "dlrm_dcnv2", "embedding__tables": TABLES, "train__log_every_steps": 1}
    whole = train(settings(tiny, tmp_path / "whole", **common, train__max_steps=6))
    train(settings(tiny, tmp_path / "parts", **common, train__max_steps=3))
    parts = train(settings(tiny, tmp_path / "parts", **common, train__max_steps=6))
    assert parts["test"]["logloss"] == whole["test"]["logloss"]
    trained = load_trained(tmp_path / "whole", "test", World.single())
    path = newest(tmp_path / "whole/checkpoints")
    assert path is not None
    pooled = {one["feature"]: one for one in load_dense_part(path)[1]["inputs"]["pooled"]}
    assert (pooled["user"]["width"], pooled["tags"]["pooling"], pooled["tags"]["width"]) == (6, "mean", 4)
    widths = {shard.spec.name: shard.weight.shape[1] for shard in trained.model.embeddings.shards}
    assert widths["user"] == 6 and set(widths.values()) == {4, 6}
    plain = train(settings(tiny, tmp_path / "plain", **{**common, "embedding__tables": {}}, train__max_steps=6))
    assert not np.isclose(plain["test"]["logloss"], whole["test"]["logloss"], rtol=1e-6)
