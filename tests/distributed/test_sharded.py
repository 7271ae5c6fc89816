"""Sharded equals unsharded for every scheme, pooling and row optimizer, on 2, 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sampling import product, sample

from .exactness import BITWISE, MATRIX, TOLERANCES, Ranks, bit_difference, bitwise, difference, scenario_of
from .scenario import Scenario, train, whole_tables

Record = Callable[[str, Any], None]


def differences(ranks: Ranks, size: int, scenario: Scenario) -> dict[str, float]:
    """Return the largest difference by dtype, and check it against the contract."""
    largest = {d: difference(ranks, size, scenario.but(dtype=d, num_steps=steps)) for d, steps, _ in TOLERANCES}
    assert all(largest[dtype] <= tolerance for dtype, _, tolerance in TOLERANCES), largest
    return largest


@pytest.mark.parametrize("cell", sample(MATRIX, 4, seed=2580))
def test_sharded_equals_one_process(ranks: Ranks, cell: dict[str, Any], record_property: Record) -> None:
    size, *names = cell.values()
    record_property("cell", cell)
    record_property("differences", differences(ranks, size, scenario_of(*names)))


@pytest.mark.parametrize("cell", sample(BITWISE, 4, seed=42))
def test_same_bits_for_same_upstream_gradients(ranks: Ranks, cell: dict[str, Any], record_property: Record) -> None:
    size, *names = cell.values()
    exact = bitwise(scenario_of(*names))
    assert exact is not None
    largest = bit_difference(ranks, size, exact)
    assert largest == 0
    record_property("cell", cell)
    record_property("differences", {"bits": largest})


def test_whole_runs_under_different_plans_have_the_same_bits(ranks: Ranks) -> None:
    base = Scenario(sharding="table_wise", pooling="sum", weighted=False, optimizer="rowwise_adagrad", max_ids=1)
    first, *others = (ranks(4).run(train, base.but(sharding=s)) for s in ("table_wise", "row_wise", "column_wise"))
    for other in others:
        assert [r["losses"] for r in other] == [r["losses"] for r in first]
        got, expected = whole_tables(other, base), whole_tables(first, base)
        for table, parts in expected.items():
            assert all(torch.equal(got[table][key], value) for key, value in parts.items())


def test_batch_that_does_not_divide_by_the_ranks(ranks: Ranks) -> None:
    differences(ranks, 4, Scenario(sharding="mixed", pooling="mean", weighted=True, optimizer="adam", batch_size=23))


def test_ranks_without_samples(ranks: Ranks) -> None:
    differences(ranks, 4, Scenario(sharding="mixed", pooling="sum", weighted=False, optimizer="adagrad", batch_size=3))


def test_samples_without_ids(ranks: Ranks) -> None:
    differences(ranks, 2, Scenario(sharding="mixed", pooling="sum", weighted=False, optimizer="adam", max_ids=0))


def test_many_blocks_of_samples(ranks: Ranks) -> None:
    """With more than 256 samples, contributions to one row are summed in blocks, which are equal on any number of
    ranks."""
    scenario = Scenario(sharding="column_wise", pooling="sum", weighted=True, optimizer="rowwise_adagrad")
    assert bit_difference(ranks, 4, scenario.but(batch_size=1200, num_steps=2)) == 0


OTHER_STATISTICS = product(optimizer=["rowwise_lamb", "lars", "ftrl", "frozen"], sharding=["column_wise", "mixed"])


@pytest.mark.parametrize("case", sample(OTHER_STATISTICS, 4, seed=1))
def test_optimizers_with_other_statistics(ranks: Ranks, case: dict[str, str]) -> None:
    """Optimizers need sums over rows in two stages, in one, or none. Ranks must agree on the number of exchanges."""
    optimizer, sharding = case["optimizer"], case["sharding"]
    scenario = Scenario(sharding=sharding, pooling="sum", weighted=False, optimizer=optimizer)
    if sharding == "column_wise":
        assert bit_difference(ranks, 4, scenario) == 0
    else:
        differences(ranks, 4, scenario)
