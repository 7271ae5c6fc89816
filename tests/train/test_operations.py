"""FLOPs that the planner counts from shapes, against torch's counter on real steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meseta.comm import BatchSlice, World
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.embedding.batch_context import BatchContext
from meseta.models.layers import find_dense_forward
from meseta.train.setup.meta_model import dense_only_flops, make_meta_model, make_unsharded_model, step_flops
from meseta.train.setup.specs import make_specs, make_workload
from small_run import settings

BATCH_SIZE = 96


def products(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product of shapes [B, M, K] and [B, K, N]."""
    return int(2 * a[0] * a[1] * a[2] * b[2])


def all_pairs(*shapes: Any, **_: Any) -> int:
    """Return the FLOPs of the pairs of all vectors of x [B, D] and pooled [B, F D], the last two shapes, like plain
    torch in float64."""
    x, pooled = shapes[-2:]
    return int(2 * (pooled[1] // x[1] + 1) ** 2 * x[0] * x[1])


OF_OPERATORS = {
    torch.ops.meseta.product: products,
    torch.ops.meseta.dot_interaction: all_pairs,
    torch.ops.meseta.dot_interaction_backward: all_pairs,
}
"""Formulas of operators that torch's counter does not know."""
CASES = {
    **{name: {} for name in MODEL_NAMES},
    "dlrm without products": {"model__interaction": "none"},
    "xdeepfm with dropout": {"model__dropout": 0.2, "model__batch_norm": True},
    "own_models:Plain": {},
    "own_models:AsksForNumbers": {},
}


def build(tiny: Path, run: Path, case: str, dtype: str = "float64") -> tuple[RunConfig, Dataset, Any, Any]:
    """Return (config, dataset, meta model, real model)."""
    document = settings(tiny, run, model__name=case.partition(" ")[0], embedding__dtype=dtype, **CASES[case])
    config, dataset = RunConfig.model_validate(document), Dataset.load(tiny)
    collections = [EmbeddingBagCollection(*make_specs(config, dataset)) for _ in range(2)]
    model = make_unsharded_model(config, dataset, collections[1]).to(dtype=collections[1].dtype)
    return config, dataset, make_meta_model(config, dataset, collections[0]), model


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_of_a_step_in_float64(tmp_path: Path, tiny: Path, case: str) -> None:
    _, dataset, outline, model = build(tiny, tmp_path, case)
    batch = BatchSlice(world=World.single(), step=0, batch_size_per_rank=(BATCH_SIZE,))
    dense = torch.rand(BATCH_SIZE, len(dataset.dense))
    width = sum(table.embedding_dim for table in model.embeddings.tables)
    pooled = torch.rand(BATCH_SIZE, width, dtype=torch.float64, requires_grad=True)
    with (
        FlopCounterMode(display=False, custom_mapping=OF_OPERATORS) as counter,
        model.embeddings.active_batch(BatchContext(batch_slice=batch)),
    ):
        model.score(dense, pooled).sum().backward()
    counted, predicted = counter.get_total_flops(), step_flops(outline, BATCH_SIZE, len(dataset.dense))
    if case == "own_models:AsksForNumbers":  # counted by layers, of which the first has no gradient of dense inputs
        assert predicted > 0
    else:
        assert counted > 0 and abs(predicted - counted) <= 0.02 * counted
    before = find_dense_forward(model)
    if before is not None and case in MODEL_NAMES:
        with FlopCounterMode(display=False, custom_mapping=OF_OPERATORS) as counter:
            x = before(dense).value
            sum(part.sum() for part in (x if isinstance(x, tuple) else [x]) if part.requires_grad).backward()
        assert dense_only_flops(outline, BATCH_SIZE, len(dataset.dense)) == counter.get_total_flops() <= counted


def test_attention_and_compressed_products_cost_something(tmp_path: Path, tiny: Path) -> None:
    """The expected FLOPs are those of the papers for M fields of 8 numbers: forward, and at least twice that
    backward."""
    config, dataset = RunConfig.model_validate(settings(tiny, tmp_path)), Dataset.load(tiny)
    num_fields = len(dataset.sparse) + len(dataset.dense)
    forward_flops = {
        "autoint": 2 * num_fields**2 * 3 * 2 * 2 * 32,  # <q, k> and a v: 3 layers of 2 heads of 32 columns
        "xdeepfm": 2 * 8 * (num_fields * num_fields * 64 + 64 * num_fields * 64),  # layers of 64 rows
    }
    for name, forward in forward_flops.items():
        document = settings(tiny, tmp_path, model={"name": name, "embedding_dim": 8, "deep_mlp": [4]})
        config = RunConfig.model_validate(document)
        specs = make_specs(config, dataset)
        outline = make_meta_model(config, dataset, EmbeddingBagCollection(*specs))
        linear = sum(6 * w.numel() for w in outline.parameters() if w.dim() == 2)
        flops = make_workload(config, dataset, *specs, outline).dense.flops_per_sample
        assert flops > 3 * forward and flops > 2 * linear


def test_in_float32_each_pair_is_multiplied_once(tmp_path: Path, tiny: Path) -> None:
    _, dataset, single, _ = build(tiny, tmp_path, "dlrm", "float32")
    _, _, double, _ = build(tiny, tmp_path, "dlrm")
    num_vectors, dim = len(dataset.sparse) + 1, single.bottom_mlp[-2].out_features
    saved = 2 * num_vectors**2 * 2 * dim - 3 * num_vectors * (num_vectors - 1) // 2 * 2 * dim
    counts = [step_flops(outline, BATCH_SIZE, len(dataset.dense)) for outline in (double, single)]
    assert counts[0] - counts[1] == BATCH_SIZE * saved
