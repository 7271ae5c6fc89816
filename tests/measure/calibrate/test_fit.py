"""Fits: constants that generated the times are recovered, and the conditions of the optimum hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.calibrate.calibration import (
    ShardTimings,
    error_statistics,
    fit_link,
    fit_operators,
    fit_staged,
    random_combination,
    rank_loads,
    split_peer_latency,
    with_staged,
)
from meseta.measure.calibrate.networks import fit_relative, nnls, relative_errors
from meseta.measure.calibrate.tasks import ShardingTask, TaskTable
from meseta.planner import documented_cost_model
from meseta.planner.cost.loads import ShardArrays, WorkloadLoads
from meseta.planner.cost.operators import operator_seconds
from meseta.spec import CostModel, Link
from meseta.spec.cost_model import UpdateCost


@given(st.integers(0, 10_000))
def test_no_change_of_a_non_negative_solution_helps(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = random.random((20, 6)) ** 3
    target = matrix @ np.maximum(random.normal(size=6), 0.0) + 0.3 * random.normal(size=20)
    solution = nnls(matrix, target)
    # Karush, Kuhn and Tucker: the slope is 0 for used columns and not above 0 for others.
    slope = matrix.T @ (target - matrix @ solution)
    assert (solution >= 0).all()
    assert np.abs(slope[solution > 0]).max(initial=0.0) < 1e-8 and slope.max() < 1e-8


def test_a_disturbed_measurement_has_little_influence() -> None:
    random = np.random.default_rng(0)
    terms, constants = random.random((60, 3)) * [1.0, 1e6, 1e9], np.array([1e-4, 3e-9, 2e-12])
    seconds = terms @ constants
    seconds[::10] *= 4.0
    assert fit_relative(terms, seconds) == pytest.approx(constants, rel=0.05)


def test_a_link_is_found() -> None:
    sizes = np.geomspace(1e3, 1e8, 8)
    link = fit_link(sizes, 2e-4 + sizes / 3e9)
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((2e-4, 3e9), rel=1e-6)


def test_the_time_per_peer_is_separated_from_the_latency() -> None:
    link = split_peer_latency(Link(bytes_per_s=1e9, latency_s=5e-4), 5e-5, 4)
    assert (link.latency_s, link.peer_s) == pytest.approx((3.5e-4, 5e-5))
    assert split_peer_latency(Link(bytes_per_s=1e9, latency_s=3e-4), 1e-3, 4).latency_s == pytest.approx(1.5e-4)


def test_staged_updates_of_column_shards_are_fitted_and_predicted() -> None:
    random = np.random.default_rng(5)
    terms = np.stack([np.ones(8), random.uniform(1e3, 1e5, 8), random.uniform(1e2, 1e4, 8)], axis=1)
    known = np.array([3e-4, 2e-8, 5e-8])
    assert fit_staged(terms, terms @ known) == pytest.approx(known)
    cost = with_staged(UpdateCost(), known)
    tables = (TaskTable(num_rows=1000, dim=32, pooling_factor=2.0, distribution_index=3),)
    for optimizer, is_staged in (("rowwise_adagrad", True), ("sgd", False), ("adagrad", False)):
        loads = WorkloadLoads(ShardingTask(seed=1, tables=tables, optimizer=optimizer).workload())
        load = loads.shard_loads(ShardArrays.from_values(0, (0, 1000), (np.array([0, 0]), np.array([16, 32]))))
        _, update_s = operator_seconds(CostModel(update=cost), load)
        half = 3e-4 + 2e-8 * 4096 + 5e-8 * load.num_distinct_rows[0]
        assert update_s == pytest.approx([half * is_staged, 0.0])


def test_operators_of_a_known_model_are_predicted() -> None:
    model = documented_cost_model("cpu")
    measured = []
    for seed in range(60):
        task = random_combination(seed, 1e9)
        pieces = tuple((n, (0, table.num_rows), (0, table.dim)) for n, table in enumerate(task.tables))
        untimed = ShardTimings(task, pieces, 1.0, 1.0)
        lookup, update = operator_seconds(model, rank_loads(untimed, model.cache.cache_bytes))
        took = float(lookup.sum()) + model.lookup.call_s, float(update.sum()) + model.update.call_s
        measured.append(ShardTimings(task, pieces, *took))
    lookup_cost, update_cost, cache, errors = fit_operators(measured, [measured[7::8]] * 2, "a test")
    assert cache.cache_bytes == model.cache.cache_bytes
    assert errors["lookup"].p95 < 0.02 and errors["update"].p95 < 0.02
    assert errors["lookup"].count == 7
    assert errors["lookup"].repeat_spread == 0
    assert lookup_cost.measured and update_cost.source == "a test"
    assert set(update_cost.number_s) == set(model.update.number_s)


def test_errors_are_relative() -> None:
    assert relative_errors([1.1, 0.5], [1.0, 1.0]) == pytest.approx([0.1, 0.5])
    assert error_statistics(np.array([]), np.zeros((3, 0))).count == 0
    statistics = error_statistics(np.array([1.1, 2.0]), np.array([[1.0, 2.0], [1.0, 2.0], [9.0, 2.2]]))
    assert (statistics.median, statistics.p95) == pytest.approx((0.05, 0.095))
    assert statistics.repeat_spread == 0
