"""Default settings of a run from raw files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.config import RunConfig, validate_document
from meseta.config.models import MODEL_NAMES
from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare
from meseta.models.registry import make_model
from meseta.spec import FeatureSpec, TableSpec
from meseta.train.interop.default_settings import MAX_EPOCHS, choose_settings

ROWS = 1500


def prepared(folder: Path, *, noise: int, effect: float, valid: float = 0.2, labels: int = 1) -> Dataset:
    """Prepare a log with `noise` columns of random ids, and one column that determines the click rate."""
    draw = np.random.default_rng(0)
    group, ids = draw.integers(0, 8, ROWS), draw.integers(0, 200, (ROWS, noise))
    logits = -0.5 + effect * draw.normal(0, 1, 8)[group]
    clicked = (draw.random((ROWS, labels)) < 1 / (1 + np.exp(-logits[:, None]))).astype(np.int64)
    columns = {f"y{place}": clicked[:, place] for place in range(labels)}
    columns |= {"group": group, **{f"id_{place}": ids[:, place] for place in range(noise)}}
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return prepare(
        PrepareOptions(
            sources=[str(folder / "log.parquet")],
            out=folder / "data",
            label=[f"y{place}" for place in range(labels)],
            sparse=["*"],
            hash_rows=500,
            valid_fraction=valid,
        )
    )


def config(dataset: Dataset, folder: Path, **document: Any) -> RunConfig:
    document = {"run_dir": str(folder / "run"), "data": {"dir": str(dataset.dir)}, "num_threads": 1, **document}
    choose_settings(document, dataset)
    return validate_document(document)


def test_the_config_overrides_defaults(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, noise=1, effect=1)
    assert config(dataset, tmp_path).model.name == "deepfm"
    explicit = config(
        dataset,
        tmp_path,
        model={"embedding_dim": 3},
        train={"max_steps": 7, "eval_every_steps": 5},
        schedule={"kind": "cosine"},
        embedding={"optimizer": {"name": "adam"}, "init": {"kind": "normal"}},
    )
    assert (explicit.model.embedding_dim, explicit.model.deep_mlp) == (3, (128, 64))
    assert (explicit.train.max_steps, explicit.train.epochs) == (7, 1)
    assert (explicit.train.eval_every_steps, explicit.train.eval_every_epochs) == (5, None)
    assert (explicit.schedule.kind, explicit.schedule.step_factor) == ("cosine", 0.1)
    assert (explicit.embedding.optimizer.lr, explicit.embedding.init.scale) == (0.01, None)
    document = {"train": {"epochs": 2}}
    assert "train.epochs" not in choose_settings(document, dataset) and document["train"]["epochs"] == 2


def test_nothing_is_tuned_without_a_validation_split(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, noise=1, effect=1, valid=0.0)
    chosen = config(dataset, tmp_path)
    assert chosen.train.epochs < MAX_EPOCHS and chosen.train.finish == "last"
    assert chosen.train.early_stopping.patience is None and chosen.schedule.kind == "constant"


def test_several_labels_are_learned_together(tmp_path: Path) -> None:
    assert config(prepared(tmp_path, noise=1, effect=1, labels=2), tmp_path).model.name == "mmoe"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_can_be_built_with_default_settings(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "models"
    dataset = Dataset.load(folder / "data") if folder.exists() else prepared(folder, noise=1, effect=1)
    chosen = config(dataset, folder, model={"name": name})
    from meseta.embedding import EmbeddingBagCollection

    tables = [TableSpec(name="a", num_embeddings=9, embedding_dim=chosen.model.table_width())]
    embeddings = EmbeddingBagCollection(tables, [FeatureSpec(name="a", table="a")])
    make_model(chosen.model, embeddings, num_dense=2, seed=0)
