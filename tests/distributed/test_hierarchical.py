"""Hierarchical exchanges have the bits of flat ones and of one process, if the contract promises them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sampling import diagonal, product, sample

from .exactness import (
    OPTIMIZERS,
    POOLINGS,
    SCHEMES,
    TOLERANCES,
    Ranks,
    bit_difference,
    bitwise,
    difference,
    scenario_of,
)
from .scenario import Scenario, train, whole_tables

LAYOUTS = [(4, 2), (8, 2), (8, 4)]
"""(ranks, ranks of a host)."""
MATRIX = product(layout=LAYOUTS, sharding=SCHEMES, pooling=POOLINGS, optimizer=OPTIMIZERS)
EXACT = [cell for cell in MATRIX if bitwise(scenario_of(cell["sharding"], cell["pooling"], cell["optimizer"]))]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
"""Schemes that sum no bag over ranks."""


def two_level(layout: tuple[int, int], *names: str) -> Scenario:
    return scenario_of(*names).but(exchange="hierarchical", per_host=layout[1])


@pytest.mark.parametrize("cell", sample(MATRIX, 2, seed=465))
def test_hierarchical_equals_one_process(ranks: Ranks, cell: dict[str, Any]) -> None:
    layout, *names = cell.values()
    scenario = two_level(layout, *names)
    largest = {d: difference(ranks, layout[0], scenario.but(dtype=d, num_steps=n)) for d, n, _ in TOLERANCES}
    assert all(largest[dtype] <= tolerance for dtype, _, tolerance in TOLERANCES), largest


@pytest.mark.parametrize("cell", sample(EXACT, 4, seed=42))
def test_hierarchical_has_the_bits_of_one_process(ranks: Ranks, cell: dict[str, Any]) -> None:
    layout, *names = cell.values()
    exact = bitwise(two_level(layout, *names))
    assert exact is not None
    assert bit_difference(ranks, layout[0], exact) == 0


@pytest.mark.parametrize("case", diagonal(sharding=WHOLE_ROWS, pooling=["mean", "none"]))
def test_whole_runs_have_the_bits_of_flat_ones(ranks: Ranks, case: dict[str, str]) -> None:
    """A row that several samples of a rank look up is sent once, and its update is that of separate lookups."""
    flat = Scenario(**case, weighted=False, optimizer="rowwise_adagrad", batch_size=41)
    results = [ranks(4).run(train, flat.but(exchange=name, per_host=2)) for name in ("flat", "hierarchical")]
    assert [r["losses"] for r in results[0]] == [r["losses"] for r in results[1]]
    expected, tables = (whole_tables(of_ranks, flat) for of_ranks in results)
    for table, parts in expected.items():
        assert all(torch.equal(tables[table][key], value) for key, value in parts.items())


@pytest.mark.parametrize("sharding", ["mixed", "mixed of hosts"])
def test_ranks_without_samples_or_ids(ranks: Ranks, sharding: str) -> None:
    few = two_level((4, 2), sharding, "none", "adam").but(batch_size=3)
    assert difference(ranks, 4, few) <= 1e-5
    assert difference(ranks, 4, few.but(max_ids=0, batch_size=9, pooling="sum", weighted=True)) <= 1e-5
