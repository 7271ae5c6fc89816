"""Tests of column shards with the same rows in different slots, which exchange statistics by row and give the bits of
ordered shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta.embedding.update import GradientContribution, sum_contributions, update_rows
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import TableRows
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec, Shard, TableSpec
from meseta.storage.table import TableShard
from sampling import product, sample

ROWS, CUTS, STEPS = (30, 90), ((0, 16), (16, 48)), 3
OPTIMIZERS = {
    "rowwise_adagrad": OptimizerSpec(name="rowwise_adagrad", lr=0.1),
    "lamb": OptimizerSpec(name="lamb", lr=0.1, weight_decay=0.1),
    "lars": OptimizerSpec(name="lars", lr=0.1, momentum=0.9),
    "clipped": OptimizerSpec(name="rowwise_adam", lr=0.1, clip_norm=0.5),
}
MATRIX = product(
    optimizer=list(OPTIMIZERS),
    dtype=["float32", "float16", "bfloat16", "float64"],
    slots=["both", "first", "second"],
    pooled=[True, False],
)


def gather(parts: list[Tensor | None]) -> list[Tensor | None]:
    """Concatenate the blocks as ranks do. A line belongs to the same row on both."""
    assert all(part is not None for part in parts)
    whole = torch.cat([part for part in parts if part is not None], dim=1)
    return [whole, whole]


def column_shards(optimizer: OptimizerSpec, dtype: str) -> list[TableShard]:
    spec = TableSpec(name="t", num_embeddings=100, embedding_dim=48, dtype=dtype, optimizer=optimizer)
    return [
        TableShard.create(
            spec,
            Shard(table="t", rows=ROWS, columns=cut, ranks=(rank,)),
            make_row_optimizer(optimizer),
            seed=3,
            device="cpu",
        )
        for rank, cut in enumerate(CUTS)
    ]


def in_slots(rows: TableRows, row_ids: Tensor) -> TableRows:
    state = {name: value[row_ids] for name, value in rows.state.items()}
    return replace(rows, weight=rows.weight[row_ids], state=state, row_ids=row_ids)


@pytest.mark.parametrize("case", sample(MATRIX, 24, seed=0))
def test_column_shards_exchange_statistics_by_row(case: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    shards = column_shards(OPTIMIZERS[case["optimizer"]], case["dtype"])
    resident, in_slot_order, slots = (
        [shard.rows for shard in shards],
        [shard.rows for shard in shards],
        [torch.arange(60)] * 2,
    )
    for k, name in enumerate(("first", "second")):
        if case["slots"] in ("both", name):
            row_ids = torch.from_numpy(random.permutation(60))
            in_slot_order[k], slots[k] = in_slots(in_slot_order[k], row_ids), row_ids.argsort()
        else:
            in_slot_order[k] = replace(
                in_slot_order[k],
                weight=in_slot_order[k].weight.clone(),
                state={n: s.clone() for n, s in in_slot_order[k].state.items()},
            )
    exact = torch.float64 if case["dtype"] == "float64" else torch.float32
    for step in range(1, STEPS + 1):
        samples = torch.from_numpy(np.sort(random.integers(0, 600, 900)))
        ids, source = torch.from_numpy(random.integers(0, 60, 900) // 2 * 2), torch.arange(900)
        gradient = torch.from_numpy(random.normal(size=(600 if case["pooled"] else 900, 48))).to(exact)
        hypers = [Hyper(0.1, step, 48)] * 2
        for tables, place in ((resident, [torch.arange(60)] * 2), (in_slot_order, slots)):
            sums = [
                sum_contributions(
                    shard,
                    [
                        GradientContribution(
                            place[k][ids], samples, gradient[:, slice(*CUTS[k])], samples if case["pooled"] else source
                        )
                    ],
                    600,
                )
                for k, shard in enumerate(shards)
            ]
            update_rows(shards, tables, sums, hypers, gather, len(shards[0].optimizer.row_stats))
        for there, here, slot_of in zip(resident, in_slot_order, slots, strict=True):
            assert torch.equal(here.weight[slot_of], there.weight)
            for name, value in there.state.items():
                assert torch.equal(here.state[name][slot_of], value)
