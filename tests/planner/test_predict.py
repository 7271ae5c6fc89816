"""Tests of predicted seconds and bytes against closed forms and known directions of change."""

from dataclasses import replace

import numpy as np
import pytest

from meseta.planner import documented_cost_model, predict
from meseta.planner.cost.loads import ShardArrays, WorkloadLoads
from meseta.planner.cost.memory import PHASES, received_bytes
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.search.cost_estimator import ShardPartitioning
from meseta.spec import (
    DenseLoad,
    FeatureLoad,
    FeatureSpec,
    MesetaError,
    OptimizerSpec,
    Plan,
    Reuse,
    TableSpec,
    Topology,
    Workload,
)
from meseta.spec.transfer import step_transfers

REUSE = Reuse(
    window_samples=65_536,
    edges=(0, 1, 2, 4, 8, 16),
    rows=(0.4, 0.2, 0.2, 0.1, 0.06, 0.04),
    lookups=(0.05, 0.05, 0.08, 0.09, 0.1, 0.63),
)


def workload(
    rows: int = 100_000, dim: int = 64, pooling: float = 10.0, batch: int = 4096, **options: object
) -> Workload:
    is_sorted = bool(options.pop("is_sorted", False))
    table = TableSpec(name="t", num_embeddings=rows, embedding_dim=dim, **options)  # type: ignore[arg-type]
    load = FeatureLoad(pooling_factor=pooling, reuse=REUSE, is_sorted=is_sorted)
    return Workload(
        tables=(table,),
        features=(FeatureSpec(name="f", table="t"),),
        batch_size=batch,
        loads={"f": load},
        dense=DenseLoad(flops_per_sample=1e6, parameter_bytes=4_000_000, activation_bytes_per_sample=4000),
    )


def seconds(work: Workload) -> tuple[float, float]:
    loads = WorkloadLoads(work)
    lookup, update = operator_seconds(documented_cost_model("cpu"), loads.shard_loads(loads.whole_tables()))
    return float(lookup[0]), float(update[0])


def test_ids_and_bags_are_counted() -> None:
    loads = WorkloadLoads(workload()).shard_loads(WorkloadLoads(workload()).whole_tables())
    assert (loads.num_ids[0], loads.num_bags[0], loads.num_output_rows[0]) == (40_960, 4096, 4096)
    assert (loads.row_bytes[0], loads.state_bytes[0]) == (256, 4)
    one = np.ones(1, np.int64)
    cut = ShardPartitioning(host_row_parts=0 * one, column_parts=one, host_column_parts=one, row_parts=one)
    ids, answers = received_bytes(step_transfers(workload(), None, 2, 2), loads, cut, 2)
    assert (ids[0], answers[0]) == (4 * (4096 + 40_960), 4096 * 64 * 4)


@pytest.mark.parametrize(
    "larger", [{"dim": 128}, {"pooling": 20.0}, {"batch": 8192}, {"optimizer": OptimizerSpec(name="adam")}]
)
def test_more_work_takes_longer(larger: dict[str, object]) -> None:
    small, large = seconds(workload()), seconds(workload(**larger))  # type: ignore[arg-type]
    assert large[0] >= small[0]
    assert large[1] > small[1]


def test_frozen_rows_are_not_updated() -> None:
    assert seconds(workload(optimizer=OptimizerSpec(name="frozen")))[1] == 0.0


def test_row_ranges_share_the_lookups_of_their_table() -> None:
    for is_sorted in (False, True):
        loads = WorkloadLoads(workload(is_sorted=is_sorted))
        pieces = ShardArrays.from_values(0, ([0, 1000, 30_000], [1000, 30_000, 100_000]), (0, 64))
        share = loads.lookup_share(pieces)
        assert share.sum() == pytest.approx(1.0)
        distinct = loads.distinct_rows(pieces, 4096.0)
        assert distinct.sum() == pytest.approx(loads.distinct_rows(loads.whole_tables(), 4096.0)[0])
        if is_sorted:
            assert share[0] > 0.15 > share[2]
        else:
            assert share == pytest.approx([0.01, 0.29, 0.7])


def test_a_larger_cache_fetches_fewer_rows() -> None:
    loads = WorkloadLoads(workload())
    pieces, nobody = loads.whole_tables(), np.zeros(1, np.int64)
    held = [loads.hardware_cached_samples(pieces, nobody, 1, size)[0] for size in (1e4, 1e6, 1e8)]
    assert held == sorted(held)
    assert loads.distinct_rows(pieces, held[1])[0] * 64 * 5 == pytest.approx(1e6, rel=0.1)
    misses = [loads.shard_loads(pieces, hardware_cached_samples=samples).lookup_misses[0] for samples in held]
    assert misses == sorted(misses, reverse=True)


def test_tiers_cost_more_the_further_away_they_are() -> None:
    loads = WorkloadLoads(workload(rows=10_000_000))
    step_seconds = []
    for tier in (0, 2, 1, 3):  # hbm, cached, host, disk
        pieces = ShardArrays.from_values(0, (0, 10_000_000), (0, 64), tier, 2_000_000)
        model, load = documented_cost_model("a100"), loads.shard_loads(pieces)
        step_seconds.append(
            float((sum(operator_seconds(model, load)) + load.tier_misses * disk_seconds(model, load))[0])
        )
    assert step_seconds[0] <= step_seconds[1] <= step_seconds[2] < step_seconds[3]


def plan(scheme: str, work: Workload, ranks: int) -> Plan:
    return Plan.from_dict({"tables": {"*": scheme}}, work.tables, ranks)


def test_tables_are_counted_exactly_and_phases_grow() -> None:
    work, topology = workload(), Topology(devices_per_host=2)
    prediction = predict(plan("row_wise", work, 2), work, topology)
    start = prediction.memory_bytes["start"]["hbm"]
    assert start.tolist() == [50_000 * (256 + 4) + 4_000_000] * 2
    assert tuple(prediction.memory_bytes) == PHASES
    steady = prediction.memory_bytes["steady"]["hbm"]
    assert (steady >= prediction.memory_bytes["evaluation"]["hbm"]).all() and (steady > start).all()
    assert (prediction.peak_bytes() == steady).all()


def test_replicas_store_their_gradient_and_exchange_nothing_else() -> None:
    work, topology = workload(), Topology(devices_per_host=2)
    prediction = predict(plan("data_parallel", work, 2), work, topology)
    checkpoint, start = (prediction.memory_bytes[phase]["hbm"][0] for phase in ("checkpoint", "start"))
    assert checkpoint - start == 100_000 * 65 * 4 + 3 * 4_000_000
    sent = {collective.name: collective.sent_intra_host.sum() for collective in prediction.collectives}
    assert sent["replicas"] == 2 * 100_000 * 65 * 4
    assert sent["ids"] == sent["embeddings"] == 0


def test_the_step_is_made_of_its_parts() -> None:
    work, topology = workload(), Topology(devices_per_host=4)
    model = documented_cost_model("cpu")
    prediction = predict(plan("table_wise", work, 4), work, topology, model)
    assert prediction.bottleneck == 0
    assert prediction.seconds["lookup"][1:].tolist() == [0, 0, 0]
    waits = prediction.step_s - prediction.compute_s.max() - prediction.seconds["dense"].max()
    assert waits > 0
    slower = replace(topology, inside=replace(model.exchange.inside_all_to_all, bytes_per_s=1e8))
    assert predict(plan("table_wise", work, 4), work, slower, model).step_s > prediction.step_s


def test_sorted_rows_make_the_first_range_the_bottleneck() -> None:
    work, topology = workload(is_sorted=True), Topology(devices_per_host=2)
    prediction = predict(plan("row_wise", work, 2), work, topology)
    assert prediction.bottleneck == 0 and prediction.compute_s[0] > 1.2 * prediction.compute_s[1]


def test_a_plan_for_other_ranks_or_tables_is_refused() -> None:
    work = workload()
    with pytest.raises(MesetaError, match="2 ranks"):
        predict(plan("row_wise", work, 2), work, Topology(devices_per_host=3))
    other = replace(work, tables=(replace(work.tables[0], name="u"),), features=(FeatureSpec(name="f", table="u"),))
    with pytest.raises(MesetaError, match="'t'"):
        predict(plan("row_wise", work, 2), other, Topology(devices_per_host=2))
