"""Tests of the exchange algorithms between hosts: chosen by prediction, stored in the plan, and set by a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from meseta.planner import documented_cost_model, find_plan, make_plan, predict
from meseta.planner.explain.communication import predict_codecs
from meseta.planner.planning import EXCHANGES, MAX_UNITS_TO_REPEAT, choose_exchange_algorithms
from meseta.planner.search.bound import lower_bound
from meseta.spec import DenseLoad, Link, Plan, Topology, Workload
from meseta.spec.codecs import CODECS, Communication, Precision
from planning_cases import random_workload

HOSTS = Topology(num_hosts=2, devices_per_host=4)
FAR = replace(HOSTS, across=Link(bytes_per_s=3e7, latency_s=1e-5))
"""Bytes between hosts are expensive and phases are cheap, so that each row should be sent once per host."""
LATE = replace(HOSTS, inside=Link(bytes_per_s=1e10, latency_s=5e-3), across=Link(bytes_per_s=1e10, latency_s=5e-3))
"""Phases are expensive and bytes are nearly free, so that two phases take twice as long as one."""


def many_ids(num_tables: int = 8) -> Workload:
    """Return a workload of long bags."""
    work = random_workload(num_tables, 3, batch_size=2048)
    loads = {name: replace(load, pooling_factor=30.0) for name, load in work.loads.items()}
    return replace(work, loads=loads, dense=DenseLoad(parameter_bytes=4_000_000))


def under(plan: Plan, work: Workload, topology: Topology) -> dict[str, float]:
    """Return the predicted step of a plan for each exchange algorithm."""
    return {one: predict(replace(plan, exchange=one), work, topology).step_s for one in EXCHANGES}


@pytest.mark.parametrize(
    ("topology", "expected", "num_tables"),
    [
        (FAR, "hierarchical", 5),
        (LATE, "flat", 5),
        pytest.param(FAR, "hierarchical", MAX_UNITS_TO_REPEAT + 20, marks=pytest.mark.soak),
        pytest.param(LATE, "flat", MAX_UNITS_TO_REPEAT + 20, marks=pytest.mark.soak),
    ],
)
def test_auto_chooses_the_faster_algorithm(topology: Topology, expected: str, num_tables: int) -> None:
    work = many_ids(num_tables)
    if num_tables > MAX_UNITS_TO_REPEAT:
        topology = replace(topology, num_hosts=2, devices_per_host=2)
    result = find_plan(work, topology)
    assert result.plan.exchange == expected == result.problem.algorithms[0]
    steps = under(result.plan, work, topology)
    assert result.prediction.step_s == pytest.approx(steps[expected]) and steps[expected] == min(steps.values())
    assert lower_bound(result.problem).step_s <= result.prediction.step_s
    for one in EXCHANGES if num_tables < MAX_UNITS_TO_REPEAT else ():
        forced = find_plan(replace(work, comm=Communication(exchange=one)), topology)
        assert forced.plan.exchange == one and result.prediction.step_s <= forced.prediction.step_s


def test_auto_considers_every_tier() -> None:
    """If tables fit into devices under neither algorithm, the time without other tiers is no limit."""
    work = many_ids(3)
    work = replace(work, tables=tuple(replace(t, num_embeddings=200 * t.num_embeddings) for t in work.tables))
    held = sum(4 * table.num_embeddings * table.embedding_dim for table in work.tables)
    forced = {one: replace(work, comm=Communication(exchange=one)) for one in EXCHANGES}
    roomy = find_plan(forced["flat"], FAR).prediction
    topology = replace(FAR, hbm_bytes=int(0.3 * roomy.peak_bytes().max()), disk_bytes=10 * held)
    result = find_plan(work, topology)
    assert {shard.tier for table in result.plan.tables for shard in table.shards} > {"hbm"}
    assert result.prediction.step_s <= min(find_plan(one, topology).prediction.step_s for one in forced.values())


@pytest.mark.parametrize("limit", [3, pytest.param(MAX_UNITS_TO_REPEAT, marks=pytest.mark.soak)])
def test_the_faster_algorithm_is_searched_if_the_plan_of_the_other_does_not_fit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meseta.planner.planning.MAX_UNITS_TO_REPEAT", limit)
    work, topology = many_ids(limit + 3), replace(FAR, devices_per_host=2)
    flat = find_plan(replace(work, comm=Communication(exchange="flat")), topology)
    crossed = predict(replace(flat.plan, exchange="hierarchical", dense_exchange="cross_host"), work, topology)
    assert crossed.step_s < flat.prediction.step_s
    peaks = flat.prediction.peak_bytes().max(), crossed.peak_bytes().max()
    topology = replace(topology, hbm_bytes=int(sum(peaks) / 2))
    assert peaks[1] > topology.hbm_bytes
    result = find_plan(work, topology)
    assert result.plan.exchange == "hierarchical" and result.prediction.step_s < flat.prediction.step_s
    assert result.prediction.peak_bytes().max() <= topology.hbm_bytes


def test_gains_are_predictions_of_the_chosen_plan() -> None:
    result = find_plan(replace(many_ids(4), comm=Communication(precision="bf16")), FAR)
    listed = {(one.precision, one.exchange): one for one in predict_codecs(result)}
    assert {*listed} == {(name, way) for name in get_args(Precision) for way in EXCHANGES}
    chosen = listed["bf16", result.plan.exchange]
    assert [one for one in listed.values() if one.is_chosen] == [chosen]
    assert chosen.step_s == pytest.approx(result.prediction.step_s)
    assert (
        listed["int8", "flat"].inter_host_bytes
        < listed["bf16", "flat"].inter_host_bytes
        < listed["fp32", "flat"].inter_host_bytes
    )
    sent = sum(sum(one.inter_host_bytes for one in of_rank.values()) for of_rank in result.prediction.transfers_by_rank)
    assert sent == pytest.approx(chosen.inter_host_bytes)
    assert predict_codecs(find_plan(many_ids(2), Topology())) == []


def test_one_host_and_one_rank_of_each_host_have_no_choice() -> None:
    work = many_ids(4)
    for topology in (Topology(devices_per_host=4), Topology(num_hosts=4), Topology()):
        forced = replace(work, comm=Communication(exchange="hierarchical"))
        plan = make_plan(forced, topology)
        assert plan.exchange is None and plan.dense_exchange is None
        assert choose_exchange_algorithms(plan, forced, topology) == plan


def test_sums_use_a_chain_if_peers_are_expensive() -> None:
    """Compares seven cross-host peers with a delay each to two neighbors. With a codec there is no chain."""
    across = Link(bytes_per_s=1e9, latency_s=1e-6, peer_s=1e-3)
    topology = Topology(num_hosts=8, devices_per_host=2, across=across)
    work = replace(many_ids(4), comm=Communication(exchange="hierarchical"))
    result = find_plan(work, topology)
    assert result.plan.dense_exchange == "chain"
    cross_host = find_plan(
        replace(work, comm=Communication(exchange="hierarchical", dense_exchange="cross_host")), topology
    )
    assert cross_host.plan.dense_exchange == "cross_host" and result.prediction.step_s < cross_host.prediction.step_s
    assert result.bound.step_s <= result.prediction.step_s
    coded = replace(work, comm=Communication(exchange="hierarchical", dense="bf16"))
    assert make_plan(coded, topology).dense_exchange == "cross_host"


def test_a_plan_keeps_its_algorithm_unless_a_run_sets_one(tmp_path: Path) -> None:
    work = many_ids(4)
    plan = Plan.from_dict({"devices_per_host": 4, "tables": {"*": "row_wise"}}, work.tables, 8)
    steps = under(plan, work, FAR)
    assert choose_exchange_algorithms(plan, work, FAR).exchange == min(steps, key=steps.__getitem__)
    for one in EXCHANGES:
        asked = replace(work, comm=Communication(exchange=one))
        assert choose_exchange_algorithms(plan, asked, FAR).exchange == one
        kept = replace(plan, exchange=one)
        assert choose_exchange_algorithms(kept, work, FAR).exchange == one
        chosen = choose_exchange_algorithms(kept, work, FAR)
        chosen.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json", work.tables, 8) == chosen
    flat, asked = replace(plan, exchange="flat"), replace(work, comm=Communication(exchange="hierarchical"))
    assert choose_exchange_algorithms(flat, asked, FAR) == replace(
        plan, exchange="hierarchical", dense_exchange="cross_host"
    )


def test_codecs_shorten_steps_on_slow_links_and_lengthen_them_on_fast_ones() -> None:
    work, fast = many_ids(4), replace(HOSTS, inside=Link(bytes_per_s=1e12, latency_s=0), across=None)
    fast = replace(fast, across=fast.inside)
    model = documented_cost_model("cpu")
    plan = Plan.from_dict({"devices_per_host": 4, "tables": {"*": "table_wise"}}, work.tables, 8)
    model = replace(model, exchange=replace(model.exchange, copy_byte_s=0.0))
    for name in (name for name, codec in CODECS.items() if not codec.is_lossless):
        coded = replace(work, comm=Communication(precision=name))
        assert predict(plan, coded, FAR, model).step_s < predict(plan, work, FAR, model).step_s
        step_s, plain_s = (predict(plan, one, fast, model).step_s for one in (coded, work))
        assert step_s > plain_s if CODECS[name].scale_bytes else step_s == pytest.approx(plain_s, rel=1e-3)
