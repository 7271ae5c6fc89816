"""Judging plans by measured shares: the shards of devices, baselines with whole tables, and the cost of a step."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from balance.baselines import (
    BASELINES,
    baseline_plans,
    dims,
    lookups,
    place_by_key,
    place_by_seconds,
    sizes,
    whole_tables,
)
from balance.outcome import BalanceOutcome, ratios_to, read_outcomes, success, versus
from balance.shares import Cost, DeviceShards, judge, shares_of, why_too_large
from balance.torchrec_plan import translate

from meseta.measure.calibrate.rank_timer import RankTimer
from meseta.measure.calibrate.tasks import ShardingTask, TaskTable, random_task
from meseta.planner import documented_cost_model, find_plan, predict
from meseta.planner.search.assignment import Assignment
from meseta.planner.search.problem import PlacementProblem
from meseta.spec import MesetaError, Plan, Topology, Workload

MODEL = documented_cost_model("cpu")
FOUR = Topology(devices_per_host=4, hbm_bytes=4_000_000_000)
ROOMY = [seed for seed in range(40) if 3e9 < random_task(seed).num_bytes < 5e9][:2]


def some_tables(rows: Sequence[int], dims: Sequence[int], pooling: float = 4.0) -> ShardingTask:
    tables = [
        TaskTable(num_rows=n, dim=d, pooling_factor=pooling, distribution_index=0)
        for n, d in zip(rows, dims, strict=True)
    ]
    return ShardingTask(seed=1, tables=tuple(tables))


def plan_of(workload: Workload, document: dict[str, object], num_ranks: int = 4) -> Plan:
    return Plan.from_dict({"tables": document}, workload.tables, num_ranks)


def test_shares_hold_every_table_exactly_once() -> None:
    task = some_tables([1000, 2000, 300, 500, 700], [32, 64, 8, 128, 16])
    schemes = {"t0": "row_wise", "t1": "column_wise", "t2": "data_parallel", "*": "table_wise"}
    plans = [plan_of(task.workload(), schemes), find_plan(task.workload(), FOUR, MODEL).plan]
    for plan in plans:
        cells = [np.zeros((table.num_rows, table.dim), int) for table in task.tables]
        shares = shares_of(plan, task.workload())
        assert len(shares) == 4 and len({share.replicas for share in shares}) == 1
        for t, rows, columns in [piece for share in shares for piece in share.shards] + list(shares[0].replicas):
            cells[t][slice(*rows), slice(*columns)] += 1
        assert all((table_cells == 1).all() for table_cells in cells)
    assert shares_of(plans[0], task.workload())[2].replicas == ((2, (0, 300), (0, 8)),)
    on_disk = replace(plans[0].tables[4].shards[0], tier="disk")
    spilled = replace(plans[0], tables=(*plans[0].tables[:4], replace(plans[0].tables[4], shards=(on_disk,))))
    with pytest.raises(MesetaError, match="'disk'"):
        shares_of(spilled, task.workload())


@pytest.mark.parametrize("seed", ROOMY)
def test_baselines_place_whole_tables_that_fit(seed: int) -> None:
    task = random_task(seed)
    plans = baseline_plans(task.workload(), FOUR, MODEL, seed)
    assert list(plans) == list(BASELINES)
    for plan in plans.values():
        assert plan is not None and why_too_large(plan, task.workload(), FOUR, MODEL) is None
        held = np.zeros(4)
        for entry, table in zip(plan.tables, task.tables, strict=True):
            [shard] = entry.shards
            assert (shard.rows, shard.columns) == ((0, table.num_rows), (0, table.dim))
            held[shard.ranks[0]] += table.num_rows * (4 * table.dim + 4)
        assert held.max() <= FOUR.hbm_bytes  # type: ignore[operator]
    again, other = (baseline_plans(task.workload(), FOUR, MODEL, n)["random"] for n in (seed, seed + 1))
    assert again == plans["random"] != other


def test_baselines_fail_if_a_table_is_larger_than_a_device() -> None:
    task = some_tables([9_000_000, 1000], [128, 8])
    assert set(baseline_plans(task.workload(), FOUR, MODEL, 0).values()) == {None}
    everywhere = plan_of(task.workload(), {"t0": {"sharding": "table_wise", "ranks": [2]}, "t1": "table_wise"})
    assert "rank 2" in str(why_too_large(everywhere, task.workload(), FOUR, MODEL))


def test_greedy_follows_its_key_and_the_room() -> None:
    workload = some_tables([4_000_000, 1000, 3_000_000, 2_000_000], [64, 128, 32, 16], pooling=3.0).workload()
    assert sizes(workload).tolist() == [4e6 * 260, 1e3 * 516, 3e6 * 132, 2e6 * 68]
    assert dims(workload).tolist() == [64, 128, 32, 16]
    assert lookups(workload).tolist() == [192, 384, 96, 48]
    two = Topology(devices_per_host=2, hbm_bytes=4_000_000_000)
    assert ranks_of(whole_tables(workload, two, MODEL), sizes(workload)) == [0, 1, 1, 1]
    assert ranks_of(whole_tables(workload, two, MODEL), dims(workload)) == [1, 0, 1, 1]
    # Rank 1 is next for t2, but has space only for t0.
    small = replace(two, hbm_bytes=1_300_000_000)
    assert ranks_of(whole_tables(workload, small, MODEL), dims(workload)) == [1, 0, 0, 1]


def ranks_of(problem: PlacementProblem, key: np.ndarray) -> list[int]:
    assignment = place_by_key(problem, key)
    assert assignment is not None
    return [int(ranks[0]) for ranks in assignment.ranks]


def longest_of(assignment: Assignment | None, seconds: Sequence[float]) -> float:
    assert assignment is not None
    return float(np.bincount([int(ranks[0]) for ranks in assignment.ranks], seconds).max())


def test_differencing_keeps_its_bound() -> None:
    """At most 7/6 of the optimum for two parts (M. Fischetti and S. Martello, Annals of Operations Research 7, 1987)
    and 4/3 - 1/(3 k) for k (W. Michiels et al., Journal of Combinatorial Optimization 13, 2007)."""
    random = np.random.default_rng(3)
    for num_ranks in (2, 3, 4):
        topology = Topology(devices_per_host=num_ranks, hbm_bytes=4_000_000_000)
        problem = whole_tables(some_tables([1000] * 7, [16] * 7).workload(), topology, MODEL)
        places = np.array(list(itertools.product(range(num_ranks), repeat=7)))
        for _ in range(5):
            seconds = random.uniform(1.0, 10.0, 7)
            longest = longest_of(place_by_seconds(weighted(problem, seconds)), seconds)
            loads = np.stack([(places == rank) @ seconds for rank in range(num_ranks)])
            least = loads.max(axis=0).min()  # over all placements
            assert least - 1e-9 <= longest <= (7 / 6 if num_ranks == 2 else 4 / 3 - 1 / (3 * num_ranks)) * least + 1e-9


def test_differencing_of_the_textbook() -> None:
    # Karmarkar and Karp's method on 8, 7, 6, 5, 4 gives 16 and 14. The optimum is 15 and 15.
    topology = Topology(devices_per_host=2, hbm_bytes=4_000_000_000)
    problem = whole_tables(some_tables([1000] * 5, [16] * 5).workload(), topology, MODEL)
    seconds = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert longest_of(place_by_seconds(weighted(problem, np.array(seconds))), seconds) == 16.0


def weighted(problem: PlacementProblem, seconds: np.ndarray) -> PlacementProblem:
    """Return the problem with other times per table."""
    option_seconds = np.zeros_like(problem.options.seconds)
    option_seconds[:, 0] = seconds
    return replace(problem, options=replace(problem.options, seconds=option_seconds))


def test_a_cost_adds_the_slowest_share_and_the_communication() -> None:
    task = some_tables([1000, 2000, 3000], [16, 32, 64])
    workload = task.workload()
    apart = {f"t{n}": {"sharding": "table_wise", "ranks": [n]} for n in range(3)}
    joined = {**apart, "t2": {"sharding": "table_wise", "ranks": [0]}}
    plans = {"apart": plan_of(workload, apart), "joined": plan_of(workload, joined)}
    timed: list[DeviceShards] = []

    def time_share(share: DeviceShards) -> tuple[float, float]:
        timed.append(share)
        turn = timed.count(share)  # the median of three rounds is that of the second
        return 10.0 * sum(t + 1 for t, _, _ in share.shards) * turn, 1.0 * turn

    costs = judge(plans, workload, FOUR, MODEL, time_share, 3)
    # The shares are {0}, {1}, {2} and {0, 2}. The empty one is not timed, and both plans have that of table 1.
    assert len(timed) == 3 * 4 and timed[:4] == timed[4:8] == timed[8:] and len(set(timed)) == 4
    assert costs["apart"].lookup_s == (20.0, 40.0, 60.0, 0.0) and costs["apart"].update_s == (2.0, 2.0, 2.0, 0.0)
    assert costs["joined"].lookup_s == (80.0, 40.0, 0.0, 0.0)
    for name, slowest in (("apart", 62.0), ("joined", 82.0)):
        exchanged = predict(plans[name], workload, FOUR, MODEL)
        waited = sum(exchanged.seconds[part].max() for part in ("input_dist", "output_dist", "gradient_dist"))
        assert 0 < costs[name].communication_s <= waited + 1e-12
        assert costs[name].step_s == pytest.approx(slowest + costs[name].communication_s)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_shares_of_any_sharding_are_timed(optimizer: str) -> None:
    task = replace(some_tables([2000, 500, 300], [64, 8, 20]), batch_size=64, optimizer=optimizer)
    timer = RankTimer(1 << 22)
    whole, columns = (0, (0, 2000), (0, 64)), (0, (0, 1000), (16, 64))
    replicas = [(1, (0, 500), (0, 8)), (2, (0, 100), (0, 20))]
    for pieces, everywhere in (([whole], []), ([columns, (2, (100, 300), (0, 20))], replicas), ([], replicas)):
        lookup_s, update_s, others = timer.time_device(task.to_dict(), pieces, everywhere, 4, 1)
        assert 0 < lookup_s < 1 and 0 < update_s < 1 and others >= 0


def outcome(seed: int, **costs: float) -> BalanceOutcome:
    made = {
        name: Cost(lookup_s=(0.25 * cost, 0.0), update_s=(0.25 * cost, 0.1 * cost), communication_s=0.5 * cost,
                   predicted_s=1.0)
        for name, cost in costs.items()
    }  # fmt: skip
    return BalanceOutcome(seed=seed, judged_by="abc", costs=made, failures={"random": "no room"})


def test_outcomes_are_stored_and_compared(tmp_path: Path) -> None:
    outcomes = [outcome(1, ours=2.0, ldm=4.0, size=3.0), outcome(2, ours=3.0, ldm=2.0), outcome(3, ours=1.0)]
    assert ratios_to(outcomes, "ours", ("ldm", "size")) == pytest.approx([2 / 3, 1.5])
    ratios = versus(ratios_to(outcomes, "ours", ("ldm",)))
    assert (ratios.num_tasks, ratios.mean, ratios.worst, ratios.wins) == pytest.approx((2, 1.0, 1.5, 0.5))
    assert success(outcomes, ("ldm",)) == pytest.approx(2 / 3) and success(outcomes, ("random",)) == 0.0
    assert outcomes[0].has(("ours", "random")) and not outcomes[1].has(("size",))
    path = tmp_path / "out.jsonl"
    assert read_outcomes(path, "abc") == []
    path.write_text("".join(one.to_json() + "\n" for one in outcomes) + outcomes[0].to_json()[:50])
    assert read_outcomes(path, "abc") == outcomes and len(path.read_text().splitlines()) == 3
    with pytest.raises(MesetaError, match="cost model"):
        read_outcomes(path, "other")
    path.write_text("{}\n")
    with pytest.raises(MesetaError, match="line 1"):
        read_outcomes(path, "abc")


def test_plans_of_torchrec_are_translated() -> None:
    workload = some_tables([1000, 10, 100, 50], [16, 8, 96, 64]).workload()
    sharded = {
        "t0": {"sharding": "row_wise", "shards": [[[250 * n, 0], [250, 16], n] for n in range(4)]},
        "t1": {"sharding": "data_parallel", "shards": []},
        "t2": {"sharding": "column_wise", "shards": [[[0, 0], [100, 44], 1], [[0, 44], [100, 52], 3]]},
        "t3": {"sharding": "table_wise", "shards": [[[0, 0], [50, 64], 2]]},
    }
    shares = shares_of(translate(sharded, workload, FOUR), workload)
    assert {share.replicas for share in shares} == {((1, (0, 10), (0, 8)),)}
    assert [share.shards for share in shares] == [
        ((0, (0, 250), (0, 16)),),
        ((0, (250, 500), (0, 16)), (2, (0, 100), (0, 48))),
        ((0, (500, 750), (0, 16)), (3, (0, 50), (0, 64))),
        ((0, (750, 1000), (0, 16)), (2, (0, 100), (48, 96))),
    ]
