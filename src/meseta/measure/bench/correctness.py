"""Correctness checks before a benchmark: lookups and train steps compared with plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meseta.embedding import EmbeddingBagCollection
from meseta.measure.bench.ops_meseta import make_collection, make_ids
from meseta.measure.bench.workloads import make_optimizer
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.synthetic_batches import LookupWorkload, make_id_batches
from meseta.ops.row_program.optimizer import Hyper, RowState, reference_step
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import InitSpec
from meseta.spec.optimizer import USED_FIELDS
from meseta.storage import ROW

NUM_STEPS = 3
TOLERANCE = 1e-5
"""Maximum error relative to the largest element of a tensor, for float32."""
# With a small epsilon, rounding errors of gradients that cancel would become large steps.
EPS = 1e-2
"""Epsilon of the row optimizers."""
# Rounding may return either neighbor of the exact value.
UNIT = {"float32": 0.0, "float64": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative distance between neighboring numbers, by type of the stored rows."""


class OperatorCheck(BenchmarkTarget):
    """Benchmark target that compares Meseta's operators with plain torch. It times nothing."""

    def facts(self) -> dict[str, Any]:
        return {"actions": []}

    def check(self, workload: dict[str, Any], optimizer: str, dtype: str) -> list[str]:
        """Run some train steps and return one line per deviation from the reference, or an empty list."""
        shape = LookupWorkload.from_json(workload)
        spec = make_optimizer(optimizer, lr=0.1)
        if "eps" in USED_FIELDS[spec.name]:
            spec = replace(spec, eps=EPS)
        embeddings = make_collection(shape, spec, dtype, InitSpec(kind="uniform", scale=1.0))
        torch.manual_seed(0)
        wrong = []
        for step, batch in enumerate(make_id_batches(shape, NUM_STEPS), start=1):
            ids = make_ids(batch, len(shape.rows))
            gradient = torch.randn(shape.batch_size, sum(shape.dims))
            wrong += [f"{shape.name}, step {step}: {text}" for text in _check_step(embeddings, ids, gradient, step)]
        return wrong


def _check_step(embeddings: EmbeddingBagCollection, ids: KeyedJaggedTensor, gradient: Tensor, step: int) -> list[str]:
    """Run one lookup and one update. Returns one line per deviation from a reference that starts at the same rows."""
    shards = embeddings.shards
    rows, states = [], []
    for shard in shards:
        values = {name: value.double() for name, value in shard.read(0, shard.shard.num_rows).items()}
        rows.append(values.pop(ROW).clone().requires_grad_())
        states.append({name: value.clone() for name, value in values.items()})
    want = torch.cat([_pool_reference(embeddings, ids, f, table) for f, table in enumerate(rows)], dim=1)
    want.backward(gradient.double())
    got = embeddings(ids).pooled.values
    wrong = _compare("lookup", got.detach(), want.detach(), 0.0)
    got.backward(gradient)
    for f, (shard, table, state) in enumerate(zip(shards, rows, states, strict=True)):
        assert table.grad is not None
        hyper = Hyper(lr=shard.spec.optimizer.lr, step=step, embedding_dim=shard.spec.embedding_dim)
        touched = torch.unique(ids[f"f{f}"].values)
        part: RowState = {name: value[touched] for name, value in state.items()}
        new, new_state = reference_step(shard.optimizer, table.detach()[touched], table.grad[touched], part, hyper)
        after = table.detach().clone()
        after[touched] = new
        unit = UNIT[str(shard.dtype).removeprefix("torch.")]
        values = shard.read(0, shard.shard.num_rows)
        wrong += _compare(f"rows of table {f}", values[ROW], after, unit)
        for name in state:
            state[name][touched] = new_state[name]
            wrong += _compare(f"{name} of table {f}", values[name], state[name], 0.0)
    return wrong


def _pool_reference(embeddings: EmbeddingBagCollection, ids: KeyedJaggedTensor, feature: int, table: Tensor) -> Tensor:
    spec, feature_ids = embeddings.features[feature], ids[f"f{feature}"]
    offsets = torch.cat([feature_ids.lengths.new_zeros(1), feature_ids.lengths.cumsum(0)])
    weights = feature_ids.weights.double() if spec.weighted and feature_ids.weights is not None else None
    bags = functional.embedding_bag(
        feature_ids.values, table, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
    )
    # A weighted mean also divides by the number of ids, not by the sum of weights.
    return bags / feature_ids.lengths.clamp(min=1)[:, None] if spec.pooling == "mean" else bags


def _compare(what: str, got: Tensor, want: Tensor, unit: float) -> list[str]:
    """Return one line if `got` differs from `want` by more than rounding, else an empty list."""
    scale = float(want.abs().max()) if want.numel() else 0.0
    error = (got.double() - want).abs() - unit * want.abs()
    worst = float(error.max()) if error.numel() else 0.0
    if worst <= TOLERANCE * max(scale, 1e-3):  # Also false for NaN.
        return []
    return [f"{what} differ by {worst:.3g}; the largest element is {scale:.3g}"]
