"""Tests of constraints: their meaning, plans that satisfy them, and error messages."""

import pytest

from meseta.planner import find_plan
from meseta.spec import MesetaError, Plan, ShardingType, Topology
from meseta.spec.constraints import Constraints
from planning_cases import random_workload

TOPOLOGY = Topology(num_hosts=2, devices_per_host=2, device="h100", hbm_bytes=1_000_000_000, host_bytes=8_000_000_000)
WORKLOAD = random_workload(6, 7)


def planned(document: dict) -> Plan:
    return find_plan(WORKLOAD, TOPOLOGY, None, Constraints.from_dict(document)).plan


def ranks_of(plan: Plan, table: str) -> set[int]:
    return {rank for shard in plan[table].shards for rank in shard.ranks}


@pytest.mark.parametrize("sharding", list(ShardingType))
def test_every_scheme_can_be_asked_for(sharding: ShardingType) -> None:
    if sharding is ShardingType.HOT_REPLICATED:
        pytest.skip("it needs statistics of hot rows")
    workload = random_workload(3, 7)
    wide = max(workload.tables, key=lambda table: (table.embedding_dim, table.num_embeddings))
    rules = Constraints.from_dict({"tables": {wide.name: {"sharding": str(sharding)}}})
    plan = find_plan(workload, TOPOLOGY, None, rules).plan
    assert plan[wide.name].sharding is sharding


def test_plans_keep_to_all_rules() -> None:
    document = {
        "tables": {
            "t*": {"sharding": ["table_wise", "row_wise"]},
            "t0": {"ranks": [2]},
            "t1": {"tiers": "host"},
        },
        "together": [["t2", "t3"]],
        "apart": [["t0", "t4", "t5"]],
        "max_tables_per_rank": 4,
        "keep_free_bytes": {"hbm": 500_000_000},
    }
    result = find_plan(WORKLOAD, TOPOLOGY, None, Constraints.from_dict(document))
    plan = result.plan
    assert {entry.sharding for entry in plan.tables} <= {ShardingType.TABLE_WISE, ShardingType.ROW_WISE}
    assert ranks_of(plan, "t0") == {2}
    assert {shard.tier for shard in plan["t1"].shards} == {"host"}
    assert [s.ranks for s in plan["t2"].shards] == [s.ranks for s in plan["t3"].shards]
    places = [ranks_of(plan, name) for name in ("t0", "t4", "t5")]
    assert sum(map(len, places)) == len(set.union(*places))
    assert max(sum(rank in ranks_of(plan, t.name) for t in WORKLOAD.tables) for rank in range(4)) <= 4
    assert result.prediction.peak_bytes().max() <= 500_000_000


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"tabels": {}}, "unknown key 'tabels'; did you mean 'tables'?"),
        ({"tables": {"user": {}}}, "tables: no table matches 'user'"),
        ({"tables": {"t0": {"sharding": "row_wize"}}}, "did you mean 'row_wise'?"),
        ({"tables": {"t0": {"tiers": ["tape"]}}}, "tiers 'tape' is unknown"),
        ({"tables": {"t0": {"dtypes": ["float16"]}}}, "has dtype float32, but only float16 are allowed"),
        ({"tables": {"t0": {"ranks": [4]}}}, "ranks must be in 0..3, got 4"),
        ({"tables": {"t0": {"tiers": ["disk"]}}}, "the topology has none of its tiers disk"),
        ({"tables": {"t0": {"ranks": [1], "sharding": "data_parallel"}}}, "need all; allow another sharding type"),
        ({"tables": {"t0": {"ranks": [1], "sharding": "column_wise"}}}, "no placement is possible for 't0'"),
        ({"together": [["t0", "t1"]], "apart": [["t0", "t1"]]}, "must not be both together and apart"),
        ({"together": [["t0", "t1"], ["t1", "t2"]]}, "in two groups of together"),
        ({"together": [["t0", "t1"]], "tables": {"t0": {"ranks": 1}, "t1": {"ranks": 2}}}, "share no allowed rank"),
        ({"apart": [["t*"]]}, "6 tables are apart (t*), but they may only use 4 ranks"),
        ({"max_tables_per_rank": 1}, "allows 4 tables, but the model has 6"),
        ({"max_tables_per_rank": 0}, "at least 1, got 0"),
        ({"keep_free_bytes": {"hbm": 2_000_000_000}}, "keep_free_bytes of hbm must be below the 1,000,000,000 bytes"),
        ({"keep_free_bytes": 5}, "keep_free_bytes must be a mapping"),
        ({"keep": "missing.json"}, "plan file 'missing.json'"),
        ({"together": "t0"}, "must be a list"),
        ({"format": "meseta.constraints/9"}, "its format is unknown"),
    ],
)
def test_bad_constraints_are_named(document: dict, message: str) -> None:
    with pytest.raises(MesetaError) as caught:
        planned(document)
    assert message in str(caught.value)


def test_a_name_comes_after_patterns_and_keys_add_up() -> None:
    rules = Constraints.from_dict(
        {"tables": {"t1": {"sharding": "row_wise"}, "t*": {"sharding": "table_wise", "ranks": [0, 1]}}}
    )
    assert rules.rule("t1").sharding == (ShardingType.ROW_WISE,)
    assert rules.rule("t1").ranks == (0, 1)
    assert rules.rule("x").sharding is None
