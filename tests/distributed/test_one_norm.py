"""One gradient norm over layers and tables on several ranks, against one process.

tests/pipeline/test_clip_norm.py compares one process with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from covering import Setting, covering
from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import shard
from meseta.optim.dense import GradientClipper
from meseta.pipeline import Pipeline
from meseta.spec import Communication, MesetaError, OptimizerSpec, Plan, ShardingType
from meseta.spec.stages import OVERLAPS
from sampling import sample

from .pool import RankPool
from .scenario import IS_SOAK, batch_slice
from .test_overlap import MIXED, PRECISIONS, checksum
from .test_step import ROWS, Model, assert_same, global_batch, state_of

Ranks = Callable[[int], RankPool]
LIMIT = 0.5
SIZES = [13, 8, 1, 24, 16] * (4 if IS_SOAK else 2)
"""Sizes of global batches, 20 in `make soak`. Slices are uneven, and some ranks have no samples."""
SPECS = {
    "sgd": OptimizerSpec(name="sgd", lr=0.3),
    "rowwise_adagrad": OptimizerSpec(name="rowwise_adagrad", lr=0.05, initial_accumulator=0.01),
    "lamb": OptimizerSpec(name="lamb", lr=0.02, weight_decay=0.05),
    "limit of rows": OptimizerSpec(name="sgd", lr=0.3, clip_norm=0.02),
    "adam of all rows": OptimizerSpec(name="adam", lr=0.02, weight_decay=0.05, stepped_rows="all"),
    "penalty of lookups": OptimizerSpec(name="sgd", lr=0.3, weight_decay=0.01, stepped_rows="looked_up"),
    "frozen": OptimizerSpec(name="frozen"),
}
AXES: dict[str, Any] = {
    "sharding": (*map(str, ShardingType), "mixed"),
    "spec": [*SPECS],
    "size": [2, 4],
    "exchange": ["flat", "hierarchical"],
    "dense": ["replicated", "fsdp"],
    "accumulate_steps": [1, 3],
    "overlap": [(), MIXED, OVERLAPS],
    "stale": [False, True],
}


def can_meet(one: Setting, other: Setting) -> bool:
    return True


PLAIN = {"sharding": "mixed", "spec": "rowwise_adagrad", "size": 2, "exchange": "flat", "dense": "replicated",
         "accumulate_steps": 1, "overlap": (), "stale": False}  # fmt: skip
CELLS = covering(AXES, can_meet, times=1, seed=1)


def make(cell: dict[str, Any], dtype: str = "float64", comm: Communication | None = None) -> Any:
    world, model = World.current(), Model(SPECS[cell["spec"]], dtype)
    if world.size == 1:
        return model
    names = ("data_parallel", "row_wise", "column_wise", "table_wise")
    names = names if cell["sharding"] == "mixed" else (cell["sharding"],) * len(ROWS)
    entries: dict[str, Any] = {
        table: {"sharding": name, "hot_rows": 2}
        if name == "hot_replicated"
        else {"sharding": name, **cell.get("tier", {})}
        for table, name in zip(ROWS, names, strict=True)
    }
    document = {"devices_per_host": 2, "exchange": cell["exchange"], "tables": entries}
    plan = Plan.from_dict(document, model.embeddings.tables, world.size)
    return shard(model, plan, world=world, dense=cell["dense"], comm=comm)


def make_pipeline(model: Any, cell: dict[str, Any]) -> Pipeline:
    world = World.current()
    pipeline = Pipeline(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        world,
        clip=GradientClipper(norm=LIMIT, includes_rows=True),
        accumulate_steps=cell["accumulate_steps"],
        overlap=cell["overlap"] if world.size > 1 else (),
    )
    pipeline.uses_stale_embeddings = cell["stale"]
    return pipeline


def slices() -> Iterator[Batch]:
    for number, size in enumerate(SIZES):
        yield batch_slice(global_batch(number, size, weighted=number % 2 == 1), World.current())


@contextmanager
def recorded_factors(pipeline: Pipeline) -> Iterator[list[float]]:
    """Context manager that returns a list to which each step appends the factor of its gradients."""
    factors, clip = list[float](), pipeline._clip_with_rows

    def record(*arguments: Any) -> float:
        factors.append(clip(*arguments))
        return factors[-1]

    pipeline._clip_with_rows = record  # type: ignore[method-assign]
    yield factors


def run_steps(cell: dict[str, Any], dtype: str = "float64", comm: Communication | None = None) -> dict[str, Any]:
    """Return losses, factors and the state after all steps. Runs on every rank."""
    model = make(cell, dtype, comm)
    pipeline = make_pipeline(model, cell)
    with recorded_factors(pipeline) as factors:
        losses = [step.loss for step in pipeline.steps(slices())]
    state = state_of(model)
    state["dense"] = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in state["dense"]]
    return {**state, "losses": losses, "factors": factors}


@pytest.mark.parametrize("cell", [pytest.param(PLAIN, id="plain"), *sample(CELLS, 0, seed=5)])
def test_ranks_clip_by_the_norm_of_one_process(ranks: Ranks, cell: dict[str, Any]) -> None:
    alone = run_steps(cell)
    assert 1 < sum(factor < 1 for factor in alone["factors"]) < len(SIZES) - 1  # some are scaled, and some are not
    for got in ranks(cell["size"]).run(run_steps, cell):
        np.testing.assert_allclose(got["losses"], alone["losses"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(got["factors"], alone["factors"], rtol=0, atol=1e-10)
        assert_same(got, alone, 1e-10)


def checksum_of(cell: dict[str, Any], comm: Communication | None = None) -> tuple[list[float], list[float], int]:
    """Return the factors and losses of a float32 run, and the checksum of this rank's tensors. Runs on every rank."""
    model = make(cell, "float32", comm)
    pipeline = make_pipeline(model, cell)
    with recorded_factors(pipeline) as factors:
        losses = [step.loss for step in pipeline.steps(slices())]
    return factors, losses, checksum(model)


@pytest.mark.parametrize("precision", sample(PRECISIONS, 0, seed=1))
def test_overlap_changes_no_bit_and_ranks_agree(ranks: Ranks, precision: str) -> None:
    """All ranks apply one factor, also to gradients that codecs have rounded."""
    size, comm = 4 if IS_SOAK else 2, PRECISIONS[precision]
    cell = {**PLAIN, "exchange": "hierarchical", "accumulate_steps": 3}
    off = ranks(size).run(checksum_of, cell, comm)
    assert len({tuple(factors) for factors, _, _ in off}) == 1
    assert ranks(size).run(checksum_of, {**cell, "overlap": OVERLAPS}, comm) == off


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.soak) for size in (2, 4)])
def test_the_norm_has_the_same_bits_for_any_cut_of_tables(ranks: Ranks, size: int) -> None:
    """Row statistics and squared norms of column shards have the bits of whole rows, so the runs are equal."""
    expected, *_ = ranks(size).run(checksum_of, {**PLAIN, "sharding": "table_wise"})
    for sharding in ("column_wise", "table_column_wise"):
        for factors, losses, _ in ranks(size).run(checksum_of, {**PLAIN, "sharding": sharding}):
            assert (factors, losses) == expected[:2]


@pytest.mark.soak
def test_offloaded_tables_have_the_bits_of_resident_ones(ranks: Ranks) -> None:
    for sharding in ("row_wise", "column_wise"):
        cell = {**PLAIN, "sharding": sharding, "accumulate_steps": 3}
        tier = {"tier": "cached", "cache_rows": 30}
        assert ranks(2).run(checksum_of, {**cell, "tier": tier}) == ranks(2).run(checksum_of, cell)


def overflow() -> tuple[str, bool]:
    """Return the error of a step in which one rank has an infinite gradient, and whether all rows are unchanged."""
    model, world = make(PLAIN), World.current()
    rows = [shard.weight.clone() for shard in model.embeddings.shards]
    if world.rank == 1:
        model.hidden.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * float("inf"),))
    with pytest.raises(MesetaError) as refused:
        make_pipeline(model, PLAIN)(next(slices()))
    return str(refused.value), all(torch.equal(a, s.weight) for a, s in zip(rows, model.embeddings.shards, strict=True))


def test_a_non_finite_gradient_of_one_rank_stops_all_before_rows_move(ranks: Ranks) -> None:
    for message, is_unchanged in ranks(2).run(overflow):
        assert message.startswith("the gradients are not finite, so train.clip_norm cannot scale them;")
        assert is_unchanged
