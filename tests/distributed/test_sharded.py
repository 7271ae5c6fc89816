"""Sharded equals unsharded: every scheme, pooling and row optimizer, on 1, 2 and 4 ranks (DESIGN.md,
"Plan-independent")."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from .pool import RankPool
from .scenario import Scenario, train, whole_tables

SCHEMES = ["table_wise", "row_wise", "column_wise", "data_parallel", "mixed"]
POOLINGS = [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("none", False)]
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
MATRIX = [
    (size, Scenario(sharding=s, pooling=p, weighted=w, optimizer=o))
    for size, s, (p, w), o in product([2, 4], SCHEMES, POOLINGS, OPTIMIZERS)
]
Ranks = Callable[[int], RankPool]


def check_cell(ranks: Ranks, size: int, scenario: Scenario) -> None:
    """Losses, tables, states and dense weights against one process: float64 to 1e-10 over 20 steps, float32 to 1e-5."""
    for dtype, steps, tolerance in (("float64", 20, 1e-10), ("float32", 4, 1e-5)):
        cell = scenario.but(dtype=dtype, num_steps=steps)
        alone = train(cell)
        results = ranks(size).run(train, cell)
        losses = torch.tensor([r["losses"] for r in results], dtype=torch.float64).sum(0)
        close(losses, torch.tensor(alone["losses"], dtype=torch.float64), tolerance)
        for index in range(len(alone["dense"])):
            close(results[0]["dense"][index], alone["dense"][index], tolerance)
        compare_tables(whole_tables(results, cell), whole_tables([alone], cell), tolerance)


def check_bits(ranks: Ranks, size: int, scenario: Scenario) -> None:
    """Same upstream gradients: same bits of outputs, tables and states."""
    alone = train(scenario, True)
    results = ranks(size).run(train, scenario, True)
    for step in range(scenario.num_steps):
        together = torch.cat([r["outputs"][step] for r in results])
        assert torch.equal(together, alone["outputs"][step])
    compare_tables(whole_tables(results, scenario), whole_tables([alone], scenario), 0.0)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0.0, atol=tolerance)


def compare_tables(got: Any, expected: Any, tolerance: float) -> None:
    for table, parts in expected.items():
        assert parts.keys() == got[table].keys()
        for name, value in parts.items():
            close(got[table][name], value, tolerance)


def sampled(cells: list[Any], count: int) -> list[Any]:
    """A fixed sample that spreads over the matrix."""
    generator = torch.Generator().manual_seed(7)
    return [cells[i] for i in torch.randperm(len(cells), generator=generator)[:count].tolist()]


def name(cell: Any) -> str:
    size, s = cell
    return f"{size}-{s.sharding}-{s.pooling}{'-weighted' * s.weighted}-{s.optimizer}"


@pytest.mark.parametrize("cell", sampled(MATRIX, 24), ids=name)
def test_sharded_equals_one_process(ranks: Ranks, cell: tuple[int, Scenario]) -> None:
    check_cell(ranks, *cell)


@pytest.mark.soak
@pytest.mark.parametrize("cell", MATRIX, ids=name)
def test_sharded_equals_one_process_whole_matrix(ranks: Ranks, cell: tuple[int, Scenario]) -> None:
    check_cell(ranks, *cell)


# Bitwise where no bag is summed across row shards and no table is replicated.
BITWISE = [
    (size, s.but(max_ids=1) if s.sharding == "row_wise" and s.pooling != "none" else s)
    for size, s in MATRIX
    if s.sharding in ("table_wise", "row_wise", "column_wise")
]


@pytest.mark.parametrize("cell", sampled(BITWISE, 16), ids=name)
def test_same_bits_for_same_upstream_gradients(ranks: Ranks, cell: tuple[int, Scenario]) -> None:
    check_bits(ranks, *cell)


@pytest.mark.soak
@pytest.mark.parametrize("cell", BITWISE, ids=name)
def test_same_bits_for_same_upstream_gradients_whole_matrix(ranks: Ranks, cell: tuple[int, Scenario]) -> None:
    check_bits(ranks, *cell)


def test_whole_runs_under_different_plans_have_the_same_bits(ranks: Ranks) -> None:
    base = Scenario(sharding="table_wise", pooling="sum", weighted=False, optimizer="rowwise_adagrad", max_ids=1)
    runs = [ranks(4).run(train, base.but(sharding=s)) for s in ("table_wise", "row_wise", "column_wise")]
    for other in runs[1:]:
        assert [r["losses"] for r in other] == [r["losses"] for r in runs[0]]
        compare_tables(whole_tables(other, base), whole_tables(runs[0], base), 0.0)


def test_batch_that_does_not_divide_by_the_ranks(ranks: Ranks) -> None:
    scenario = Scenario(sharding="mixed", pooling="mean", weighted=True, optimizer="adam", batch_size=23)
    check_cell(ranks, 4, scenario)


def test_ranks_without_samples(ranks: Ranks) -> None:
    check_cell(ranks, 4, Scenario(sharding="mixed", pooling="sum", weighted=False, optimizer="adagrad", batch_size=3))


def test_samples_without_ids(ranks: Ranks) -> None:
    check_cell(ranks, 2, Scenario(sharding="mixed", pooling="sum", weighted=False, optimizer="adam", max_ids=0))


def test_many_blocks_of_samples(ranks: Ranks) -> None:
    """More than 256 samples: contributions to one row are cut into blocks, the same ones on any number of ranks."""
    scenario = Scenario(
        sharding="column_wise", pooling="sum", weighted=True, optimizer="rowwise_adagrad", batch_size=1200
    )
    check_bits(ranks, 4, scenario.but(num_steps=2))
