"""Every config in examples/configs/models/ loads, and its model for the columns of Criteo computes scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meseta.config import load_config
from meseta.embedding import EmbeddingBagCollection
from meseta.models import make_model
from meseta.spec import FeatureSpec, TableSpec
from source_tree import ROOT

CONFIGS = sorted((ROOT / "examples/configs/models").glob("*.yaml"))
NUM_DENSE, NUM_FEATURES = 13, 26


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config(path: Path) -> None:
    config = load_config(path)
    assert config.model.name == path.stem and config.run_dir.name == path.stem
    tables = [
        TableSpec(name=f"t{i}", num_embeddings=2, embedding_dim=config.model.table_width()) for i in range(NUM_FEATURES)
    ]
    features = [FeatureSpec(name=f"f{i}", table=f"t{i}") for i in range(NUM_FEATURES)]
    embeddings = EmbeddingBagCollection(tables, features)
    with torch.device("meta"):
        model = make_model(config.model, embeddings, NUM_DENSE, 0).eval()
        pooled = torch.zeros(3, NUM_FEATURES * config.model.table_width())
        assert model.score(torch.zeros(3, NUM_DENSE), pooled).shape == (3,)


def test_there_is_one_for_each_model_of_its_kind() -> None:
    names = {"dcnv2", "finalmlp", "final", "masknet", "gdcn", "wukong", "dhen"}
    assert {path.stem for path in CONFIGS} == names
