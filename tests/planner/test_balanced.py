"""The balanced plan: valid, repeatable, even, inside the memory, and the costs by hand."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.optim import make_row_optimizer
from meseta.planner import balanced_plan
from meseta.planner.cost import state_bytes_per_row
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, Plan, ShardingType, TableSpec, Topology

NUMBERS_OF_STATE = {
    "sgd": lambda d: 0,
    "rowwise_adagrad": lambda d: 1,
    "adagrad": lambda d: d,
    "adam": lambda d: 2 * d,
    "rowwise_adam": lambda d: d + 1,
}
VALUE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


def table(name: str, rows: int, dim: int = 16, optimizer: str = "rowwise_adagrad", dtype: str = "float32") -> TableSpec:
    spec = OptimizerSpec(name=optimizer)
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, dtype=dtype, optimizer=spec)  # type: ignore[arg-type]


def one_feature_each(tables: list[TableSpec], pooling: str = "sum") -> list[FeatureSpec]:
    return [FeatureSpec(name=f"f_{t.name}", table=t.name, pooling=pooling) for t in tables]  # type: ignore[arg-type]


def bytes_of(spec: TableSpec) -> int:
    state = NUMBERS_OF_STATE[spec.optimizer.name](spec.embedding_dim) * max(VALUE_BYTES[spec.dtype], 4)
    return spec.num_embeddings * (spec.embedding_dim * VALUE_BYTES[spec.dtype] + state)


def loads(plan: Plan, tables: list[TableSpec]) -> list[float]:
    total = [0.0] * plan.num_ranks
    for spec in tables:
        entry = plan[spec.name]
        for shard in entry.shards:
            for rank in shard.ranks:
                share = shard.num_rows * shard.num_columns / (spec.num_embeddings * spec.embedding_dim)
                total[rank] += entry.cost * share / len(shard.ranks)
    return total


def held_bytes(plan: Plan, tables: list[TableSpec]) -> list[float]:
    total = [0.0] * plan.num_ranks
    for spec in tables:
        for shard in plan[spec.name].shards:
            share = shard.num_rows * shard.num_columns / (spec.num_embeddings * spec.embedding_dim)
            for rank in shard.ranks:
                total[rank] += bytes_of(spec) * share
    return total


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TableSpec], list[FeatureSpec], dict[str, float]]:
    tables = [
        table(
            f"t{i}",
            draw(st.one_of(st.integers(1, 20), st.integers(1, 2_000_000))),
            draw(st.sampled_from([1, 8, 16, 24, 64, 128])),
            draw(st.sampled_from(list(NUMBERS_OF_STATE))),
            draw(st.sampled_from(list(VALUE_BYTES))),
        )
        for i in range(draw(st.integers(1, 8)))
    ]
    features, factors = [], {}
    for i in range(draw(st.integers(0, 10))):
        pooling = draw(st.sampled_from(["sum", "mean", "none"]))
        weighted = pooling != "none" and draw(st.booleans())
        spec = FeatureSpec(name=f"f{i}", table=draw(st.sampled_from(tables)).name, pooling=pooling, weighted=weighted)
        features.append(spec)
        if draw(st.booleans()):
            factors[spec.name] = draw(st.floats(0.0, 100.0))
    return tables, features, factors


@given(models(), st.integers(1, 9))
def test_plan_is_valid_repeatable_and_even(model: tuple, num_ranks: int) -> None:
    tables, features, factors = model
    topology = Topology(devices_per_host=num_ranks)
    plan = balanced_plan(tables, features, topology, factors)
    plan.check(tables)
    assert plan.num_ranks == num_ranks and [entry.table for entry in plan.tables] == [t.name for t in tables]
    assert balanced_plan(tables, features, topology, factors) == plan
    assert Plan.from_dict(plan.to_dict(), tables, num_ranks) == plan
    if num_ranks == 1:
        assert {entry.sharding for entry in plan.tables} == {ShardingType.TABLE_WISE}
        return
    # Graham's bound for any greedy schedule, on the layout that cuts nothing: cutting is only kept when it is better.
    replicas = [entry.cost for entry in plan.tables if entry.sharding is ShardingType.DATA_PARALLEL]
    whole = [
        table_wise_cost(spec, features, factors, num_ranks)
        for spec in tables
        if plan[spec.name].sharding is not ShardingType.DATA_PARALLEL
    ]
    bound = (sum(replicas) + sum(whole)) / num_ranks + (1 - 1 / num_ranks) * max(whole, default=0.0)
    assert max(loads(plan, tables)) <= bound * (1 + 1e-9)


def table_wise_cost(spec: TableSpec, features: list[FeatureSpec], factors: dict[str, float], num_ranks: int) -> float:
    """Bytes per sample: rows read twice and written once, state read and written, ids there, values and gradients."""
    computed = max(VALUE_BYTES[spec.dtype], 4)
    row, sent = spec.embedding_dim * VALUE_BYTES[spec.dtype], spec.embedding_dim * computed
    state = NUMBERS_OF_STATE[spec.optimizer.name](spec.embedding_dim) * computed
    cost = 0.0
    for feature in features:
        if feature.table == spec.name:
            ids = factors.get(feature.name, 1.0)
            returned = ids if feature.pooling == "none" else 1.0
            exchanged = ids * (12 if feature.weighted else 8) + 2 * returned * sent
            cost += ids * (3 * row + 2 * state) + exchanged * (num_ranks - 1) / num_ranks
    return cost


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 3))
def test_no_placement_of_whole_tables_is_much_better(factors: list[int], num_ranks: int) -> None:
    tables = [table(f"t{i}", 1_000_000) for i in range(len(factors))]
    features = one_feature_each(tables)
    by_name = {feature.name: float(factor) for feature, factor in zip(features, factors, strict=True)}
    plan = balanced_plan(tables, features, Topology(num_hosts=num_ranks), by_name)
    costs = [table_wise_cost(spec, features, by_name, num_ranks) for spec in tables]
    best = min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks))
        for owners in itertools.product(range(num_ranks), repeat=len(costs))
    )
    assert max(loads(plan, tables)) <= best * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-9)


@given(models(), st.integers(1, 5), st.floats(0.3, 3.0))
def test_memory_is_respected_or_the_lack_of_it_is_named(model: tuple, num_ranks: int, room: float) -> None:
    tables, features, factors = model
    total_bytes = sum(map(bytes_of, tables))
    hbm_bytes = int(total_bytes * room / num_ranks)
    topology = Topology(devices_per_host=num_ranks, hbm_bytes=hbm_bytes)
    try:
        plan = balanced_plan(tables, features, topology, factors)
    except MesetaError as error:
        assert f"{total_bytes:,} bytes" in str(error) and f"hbm_bytes is {hbm_bytes:,}" in str(error)
        # Equal row ranges, one column group at the least: everything cut over all ranks has to overflow as well.
        rows = sum(-(-t.num_embeddings // num_ranks) * (bytes_of(t) // t.num_embeddings) for t in tables)
        columns = any(t.embedding_dim >= 64 for t in tables)
        assert rows > hbm_bytes or columns
    else:
        plan.check(tables)
        assert max(held_bytes(plan, tables)) <= hbm_bytes


def test_costs_by_hand() -> None:
    # D=16 float32, rowwise_adagrad: row 64 bytes, state 4. One id: memory 3*64 + 2*4 = 200 bytes.
    # Exchange on 2 ranks: half of id 8 + bag 64 + gradient 64 = 68. Two tables, so both stay whole.
    tables = [table("a", 1_000_000), table("b", 1_000_000)]
    plan = balanced_plan(tables, one_feature_each(tables), Topology(devices_per_host=2))
    assert [(e.sharding, e.cost, e.shards[0].ranks) for e in plan.tables] == [
        (ShardingType.TABLE_WISE, 268.0, (0,)),
        (ShardingType.TABLE_WISE, 268.0, (1,)),
    ]
    assert balanced_plan(tables, one_feature_each(tables), Topology())["a"].cost == 200.0
    # Rows over 2 ranks return a bag each: half of 8 + 2 * 128 = 132; a lone table is cut, each rank moves 166 < 268.
    plan = balanced_plan(tables[:1], one_feature_each(tables[:1]), Topology(devices_per_host=2))
    assert (plan["a"].sharding, plan["a"].cost) == (ShardingType.ROW_WISE, 332.0)
    assert [shard.rows for shard in plan["a"].shards] == [(0, 500_000), (500_000, 1_000_000)]
    # D=64: by columns ids go out twice, half of 16 + 512, and bags once; by rows half of 8 + 1024.
    wide = [table("w", 1_000_000, 64)]
    plan = balanced_plan(wide, one_feature_each(wide), Topology(devices_per_host=2))
    assert (plan["w"].sharding, plan["w"].cost) == (ShardingType.COLUMN_WISE, 3 * 256 + 8 + 264.0)
    # Rows one by one are returned once under any scheme, and then rows are cheaper: half of 8 + 512.
    plan = balanced_plan(wide, one_feature_each(wide, "none"), Topology(devices_per_host=2))
    assert (plan["w"].sharding, plan["w"].cost) == (ShardingType.ROW_WISE, 3 * 256 + 8 + 260.0)
    # Many ids per bag: sending all ids to every column costs more than a second bag.
    plan = balanced_plan(wide, one_feature_each(wide), Topology(devices_per_host=2), {"f_w": 100.0})
    assert plan["w"].sharding is ShardingType.ROW_WISE
    # Replicas: every rank updates, 2 * 200; a ring adds 100 rows of 64 + 4 bytes over 2 ranks in steps of 2048 samples.
    tiny = [table("y", 100)]
    plan = balanced_plan(tiny, one_feature_each(tiny), Topology(devices_per_host=2))
    assert (plan["y"].sharding, plan["y"].cost, plan["y"].shards[0].ranks) == (
        ShardingType.DATA_PARALLEL,
        400.0 + 2 * 100 * 68 / 2048,
        (0, 1),
    )


def test_replicated_are_tables_whose_gradient_is_smaller_than_the_bags_of_2048_samples() -> None:
    # 68 bytes a row travel twice per step; 68 bytes a sample are exchanged on 2 ranks: up to 1024 rows.
    tables = [table("small", 1024), table("large", 1025)]
    plan = balanced_plan(tables, one_feature_each(tables), Topology(devices_per_host=2))
    assert plan["small"].sharding is ShardingType.DATA_PARALLEL
    assert plan["large"].sharding is not ShardingType.DATA_PARALLEL


def test_replicas_are_given_up_for_memory() -> None:
    tables = [table("a", 1000), table("b", 1000)]
    features = one_feature_each(tables)
    one_bytes = 1000 * 68
    enough = balanced_plan(tables, features, Topology(devices_per_host=2, hbm_bytes=2 * one_bytes))
    assert {entry.sharding for entry in enough.tables} == {ShardingType.DATA_PARALLEL}
    scarce = balanced_plan(tables, features, Topology(devices_per_host=2, hbm_bytes=one_bytes))
    assert [entry.shards[0].ranks for entry in scarce.tables] == [(0,), (1,)]


def test_a_table_larger_than_a_rank_is_cut() -> None:
    tables = [table("huge", 1_000_000), *(table(f"busy{i}", 10_000) for i in range(4))]
    factors = {f"f_busy{i}": 50.0 for i in range(4)}
    topology = Topology(devices_per_host=2, hbm_bytes=40_000_000)
    plan = balanced_plan(tables, one_feature_each(tables), topology, factors)
    assert plan["huge"].sharding is ShardingType.ROW_WISE


def test_error_names_bytes_and_largest_tables() -> None:
    tables = [table("small", 5000), table("big", 4_000_000), table("mid", 1_000_000)]
    for devices, fullest in ((1, 340_340_000), (2, 170_170_000)):
        with pytest.raises(MesetaError) as caught:
            balanced_plan(tables, one_feature_each(tables), Topology(devices_per_host=devices, hbm_bytes=100_000_000))
        text = str(caught.value)
        assert "340,340,000 bytes" in text and f"{devices} ranks would hold {fullest:,}" in text
        assert "'big' 272,000,000 bytes, 'mid' 68,000,000 bytes" in text and "more ranks" in text


@pytest.mark.parametrize("dtype", list(VALUE_BYTES))
@pytest.mark.parametrize("name", list(NUMBERS_OF_STATE))
def test_state_bytes_are_those_of_the_optimizer(name: str, dtype: str) -> None:
    spec = table("a", 6, 24, name, dtype)
    state = make_row_optimizer(spec.optimizer).init(torch.zeros(6, 24, dtype=getattr(torch, dtype)))
    assert 6 * state_bytes_per_row(spec) == sum(t.numel() * t.element_size() for t in state.values())


def test_bad_input_is_named() -> None:
    tables = [table("a", 10)]
    features = one_feature_each(tables)
    for factors, words in (
        ({"f_b": 1.0}, "'f_b'; did you mean 'f_a'?"),
        ({"f_a": -1.0}, "'f_a' must be finite and not negative, got -1.0"),
        ({"f_a": float("nan")}, "got nan"),
    ):
        with pytest.raises(MesetaError) as caught:
            balanced_plan(tables, features, Topology(), factors)
        assert words in str(caught.value)
    with pytest.raises(MesetaError, match="reads table 'b'"):
        balanced_plan(tables, [FeatureSpec(name="f", table="b")], Topology())


def test_planning_starts_without_torch_and_quickly() -> None:
    # Processor time, so that a busy machine does not fail the test.
    program = (
        "import time, sys; start = time.process_time(); import meseta, meseta.planner, meseta.config\n"
        "spent_s = time.process_time() - start\n"
        "assert 'torch' not in sys.modules, 'torch was imported'; assert spent_s < 0.5, spent_s"
    )
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(source)}, check=False
    )
    assert run.returncode == 0, run.stderr
