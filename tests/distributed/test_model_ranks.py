"""Models with dropout and norms on 1, 2 and 4 ranks (two hosts) under three plans, and the FSDP units of DHEN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from meseta.comm.dense import sharded_modules
from meseta.config import ModelConfig
from meseta.models import DHEN, make_model
from model_parts import OneRowEach
from small_run import MODELS_WITH_NORMS, dropout_and_norms, of_its_model, settings

from .pool import RankPool
from .test_training import PLANS, STEPS, WIDE, losses, train_on, weights

Ranks = Callable[[int], RankPool]
CASES = [
    pytest.param(model, dtype, marks=[] if (model, dtype) == ("final", "float64") else pytest.mark.soak)
    for model in MODELS_WITH_NORMS
    for dtype in ("float64", "float32")
]


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_dropout_and_norms_are_of_the_global_batch(
    ranks: Ranks, tiny: Path, tmp_path: Path, model: str, dtype: str
) -> None:
    common = {
        **WIDE,
        **dropout_and_norms(model),
        "embedding__dtype": dtype,
        "embedding__optimizer__lr": 0.02,
        "train__epochs": 2,
        "train__log_every_steps": 1,
        **STEPS,
    }
    for size, plan in PLANS.items():
        train_on(ranks, size, settings(tiny, tmp_path / str(size), **common, plan=plan))
    tolerance, alone = {"float64": 1e-10, "float32": 1e-5}[dtype], weights(tmp_path / "1")
    for size in PLANS.keys() - {1}:
        np.testing.assert_allclose(losses(tmp_path / str(size)), losses(tmp_path / "1"), rtol=0, atol=tolerance)
        for name, weight in weights(tmp_path / str(size)).items():
            torch.testing.assert_close(weight, alone[name], rtol=0, atol=tolerance)


def test_a_layer_of_dhen_is_gathered_as_one() -> None:
    model = make_model(
        ModelConfig(**of_its_model({"name": "dhen", "embedding_dim": 4, "layers": 3})), OneRowEach([4, 4]), 2, 0
    )
    assert isinstance(model, DHEN)
    assert dict(sharded_modules(model, model.embeddings)) == {
        "bottom": model.bottom,
        **{f"layers.{index}": layer for index, layer in enumerate(model.layers)},
        "top_mlp": model.top_mlp,
    }
