"""`LearnedFormula` with the coefficients of a world computes the logits of the world."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meseta import EmbeddingBagCollection, FeatureSpec, TableSpec
from meseta.data.synth import ClickLog
from meseta.data.synth import teacher as world_teacher
from meseta.data.synth.teacher import LOGIT_STEP, NUM_BINS
from meseta.data.synth.worlds import WORLDS, find_world
from meseta.spec import MesetaError
from tools.quality.formula import DENSE_PRODUCTS, LearnedFormula

NUM_ROWS = 500


def collection(width: int, num_features: int = 26) -> EmbeddingBagCollection:
    tables = [TableSpec(name=f"cat_{f}", num_embeddings=4, embedding_dim=width) for f in range(num_features)]
    return EmbeddingBagCollection(tables, [FeatureSpec(name=table.name, table=table.name) for table in tables], seed=0)


def formula(world: str, width: int, **changes: object) -> LearnedFormula:
    arguments = {"num_dense": 13, "labels": ("label",), "seed": 0, "world": world, **changes}
    return LearnedFormula(collection(width), **arguments)  # type: ignore[arg-type]


def world_inputs(
    model: LearnedFormula, log: ClickLog, counts: np.ndarray, ids: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the coefficients of `model`, and return the dense inputs and rows of `counts` [13, n] and `ids` [26, n]."""
    teacher = log.teacher
    of_dense, of_main, of_planted = (float(gain) for gain in teacher._gains)
    logs = np.log1p(np.maximum(counts, 0).astype(np.float32))
    dense = (logs - teacher._dense_mean[:, None]) * teacher._dense_scale[:, None]
    rows = np.zeros((ids.shape[1], 26, model.width), np.float32)
    for f, column in enumerate(ids):
        effects = teacher._effects(f, column)
        rows[:, f, 0] = of_main * effects[0] / model.main_scale
        rows[:, f, 1:] = effects[1:].T / model.latent_scale
    with torch.no_grad():
        model.line.copy_(torch.from_numpy(of_dense * teacher._linear))
        model.parabola.copy_(torch.from_numpy(of_dense * 0.5 * teacher._quadratic))
        model.dense_products.fill_(of_dense)
        model.planted *= of_planted
        model.bias.fill_(teacher.bias - sum(g * m for g, m in zip(teacher._gains, teacher._means, strict=True)))
    return torch.from_numpy(dense.T), torch.from_numpy(rows.reshape(len(rows), -1))


@pytest.mark.parametrize("world", WORLDS)
def test_formula_with_the_coefficients_of_a_world_gives_its_logits(world: str) -> None:
    assert DENSE_PRODUCTS == world_teacher.DENSE_PRODUCTS
    log = ClickLog(seed=3, scale=0.001, world=world, strength=0.7)
    rows = log.chunk(0)[:NUM_ROWS]
    model = formula(world, 1 + find_world(world).latent_dim, main_scale=0.5, latent_scale=2.0)
    with torch.no_grad():
        logits = model.score(*world_inputs(model, log, rows.dense, rows.ids)).numpy()
    true = (rows.bins - NUM_BINS // 2) * LOGIT_STEP
    assert np.abs(logits - true).max() < 1e-3 and true.std() > 0.8  # The world rounds its logits to 2**-12.


@pytest.mark.parametrize(
    ("width", "changes", "words"),
    [
        (4, {}, "set model.embedding_dim to 5"),
        (5, {"num_dense": 3}, "data of world 'pairs' must have"),
        (5, {"labels": ("a", "b")}, "data of world 'pairs' must have"),
        (5, {"world": "pears"}, "did you mean 'pairs'"),
    ],
)
def test_columns_of_another_world_are_rejected(width: int, changes: dict[str, object], words: str) -> None:
    with pytest.raises(MesetaError, match=words):
        formula(**{"world": "pairs", "width": width, **changes})  # type: ignore[arg-type]
