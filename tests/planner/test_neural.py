"""Tests of cost models with networks, which correct predictions and compare plans."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meseta.planner import documented_cost_model, find_plan, predict
from meseta.spec import CostModel, Plan, Topology, Workload
from meseta.spec.constraints import Constraints, TableRule
from meseta.spec.shards import ShardingType
from network_cases import constant_networks, crowded_networks
from planning_cases import random_workload

CPU = documented_cost_model("cpu")


def with_cache_off(model: CostModel) -> CostModel:
    """Return a model without caches, in which the cost of a shard does not depend on other shards."""
    return replace(model, cache=replace(model.cache, cache_bytes=0.0))


def test_corrections_multiply_the_constants() -> None:
    work, topology = random_workload(6, 0), Topology(devices_per_host=2)
    plan = Plan.from_dict({"tables": {"*": "row_wise"}}, work.tables, num_ranks=2)
    before = predict(plan, work, topology, CPU)
    after = predict(plan, work, topology, replace(CPU, neural=constant_networks(0.5, -0.25, 1.0)))
    assert after.seconds["lookup"] == pytest.approx(np.exp(0.5) * before.seconds["lookup"])
    assert after.seconds["table_update"] == pytest.approx(np.exp(-0.25) * before.seconds["table_update"])
    byte_s = CPU.exchange.copy_byte_s
    packing_s = sum(
        float((collective.sent_intra_host + collective.received_intra_host).max()) * byte_s
        for collective in before.collectives
    )
    bucket_s = before.step_s - before.compute_s.max() - packing_s
    bucket_s -= sum(float(collective.seconds(CPU, topology).max()) for collective in before.collectives)
    exchange_s = sum(float(collective.seconds(CPU, topology).max()) for collective in before.collectives)
    expected = after.compute_s.max() + packing_s + bucket_s + np.exp(1.0) * exchange_s
    assert after.step_s == pytest.approx(expected, rel=1e-6)


def test_no_correction_outside_the_domain_of_networks() -> None:
    work, model = random_workload(4, 1), replace(CPU, neural=constant_networks(0.5, 0.5, 1.0))
    plan = Plan.from_dict({"tables": {"*": "table_wise"}}, work.tables, num_ranks=4)
    four, hosts = Topology(devices_per_host=4), Topology(num_hosts=2, devices_per_host=2)
    for topology in (four, hosts):  # networks are of two devices on one host
        pair = [predict(plan, work, topology, cost_model) for cost_model in (CPU, model)]
        assert pair[1].seconds["output_dist"] == pytest.approx(pair[0].seconds["output_dist"], rel=1e-12)
    lamb = replace(work, tables=tuple(replace(t, optimizer=replace(t.optimizer, name="lamb")) for t in work.tables))
    pair = [predict(plan, lamb, four, cost_model) for cost_model in (CPU, model)]
    assert pair[1].seconds["table_update"] == pytest.approx(pair[0].seconds["table_update"], rel=1e-12)
    assert pair[1].seconds["lookup"] == pytest.approx(np.exp(0.5) * pair[0].seconds["lookup"])
    shards = [tuple(replace(shard, tier="host") for shard in entry.shards) for entry in plan.tables]
    away = replace(
        plan, tables=tuple(replace(e, shards=table_shards) for e, table_shards in zip(plan.tables, shards, strict=True))
    )
    pair = [predict(away, work, four, cost_model) for cost_model in (CPU, model)]
    assert pair[1].seconds["lookup"] == pytest.approx(pair[0].seconds["lookup"], rel=1e-12)


def every_plan(work: Workload, model: CostModel, topology: Topology) -> float:
    """Return the shortest predicted step of all table-wise plans."""
    names = [table.name for table in work.tables]
    least = np.inf
    for ranks in itertools.product(range(topology.num_ranks), repeat=len(names)):
        tables = {name: {"sharding": "table_wise", "ranks": [rank]} for name, rank in zip(names, ranks, strict=True)}
        plan = Plan.from_dict({"tables": tables}, work.tables, num_ranks=topology.num_ranks)
        least = min(least, predict(plan, work, topology, model).step_s)
    return least


@pytest.mark.parametrize(("seed", "gains"), [(0, True), (4, False)])
def test_networks_judge_plans(seed: int, gains: bool) -> None:
    work, topology = random_workload(6, seed), Topology(devices_per_host=2)
    rules = Constraints(tables={"*": TableRule(sharding=(ShardingType.TABLE_WISE,))})
    constants = with_cache_off(CPU)
    model = replace(constants, neural=crowded_networks(0.3))
    result = find_plan(work, topology, model, rules)
    alone = find_plan(work, topology, constants, rules)
    judged_s = predict(alone.plan, work, topology, model).step_s
    assert result.prediction.step_s < judged_s if gains else result.prediction.step_s == judged_s
    assert result.prediction.step_s <= 1.03 * every_plan(work, model, topology)
    assert result.prediction.step_s == pytest.approx(predict(result.plan, work, topology, model).step_s, rel=1e-12)
    # The bound holds for the constants, and so does the gap that is printed.
    assert result.constants_step_s == pytest.approx(predict(result.plan, work, topology, constants).step_s)
    assert result.bound.step_s <= result.constants_step_s and alone.constants_step_s == alone.prediction.step_s
    assert find_plan(work, topology, model, rules).plan == result.plan


def test_changes_keep_to_rules_and_room() -> None:
    work, topology = random_workload(8, 3, max_rows=5.0), Topology(devices_per_host=4, hbm_bytes=80_000_000)
    rules = Constraints(
        tables={"t0": TableRule(ranks=(2,)), "t1": TableRule(ranks=(0, 1))}, apart=(("t2", "t3", "t4"),)
    )
    result = find_plan(work, topology, replace(CPU, neural=crowded_networks(1.0)), rules)
    ranks = {entry.table: {rank for shard in entry.shards for rank in shard.ranks} for entry in result.plan.tables}
    assert ranks["t0"] == {2} and ranks["t1"] <= {0, 1}
    assert len(ranks["t2"] | ranks["t3"] | ranks["t4"]) == sum(len(ranks[name]) for name in ("t2", "t3", "t4"))
    assert result.prediction.peak_bytes().max() <= 80_000_000
