"""Tests of caches in plans: rows per shard, their memory, and predicted misses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meseta.data.dataset.statistics import FeatureStatistics
from meseta.planner import DoesNotFitError, documented_cost_model, find_plan, predict
from meseta.planner.cost.cache_misses import SHORT_HALF_LIFE, cache_misses, gamma_cdf
from meseta.planner.cost.loads import ShardArrays, WorkloadLoads
from meseta.planner.cost.memory import RunBytes, plan_memory_bytes
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.cost.reuse import Floats
from meseta.planner.search.cache_allocation import allocate_cache_rows
from meseta.spec import CostModel, FeatureLoad, FeatureSpec, OptimizerSpec, Plan, TableSpec, Topology, Workload
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, MAX_FILE_SIZE_RATIO, ROW_INDEX_BYTES, TIERS, StorageOptions
from meseta.storage import TieredShard, make_storages

ROWS = {"wide": (3_000, 32), "narrow": (5_000, 4), "third": (700, 16)}


def made(optimizer: str) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(name=name, num_embeddings=rows, embedding_dim=width, optimizer=OptimizerSpec(name=optimizer))
        for name, (rows, width) in ROWS.items()
    )


def workload(tables: tuple[TableSpec, ...]) -> Workload:
    return Workload(
        tables=tables, features=tuple(FeatureSpec(name=table.name, table=table.name) for table in tables), batch_size=64
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
@pytest.mark.parametrize("cache_bytes", [None, 200_000])
def test_cache_rows_are_counted_as_storage_allocates_them(
    tmp_path: Path, optimizer: str, cache_bytes: int | None
) -> None:
    tables, options = made(optimizer), StorageOptions(dir=tmp_path, cache_bytes=cache_bytes)
    places = {"wide": {"tier": "disk"}, "narrow": {"tier": "cached"}, "third": {"tier": "disk", "cache_rows": 123}}
    plan = Plan.from_dict({"tables": {n: {"sharding": "table_wise", **of} for n, of in places.items()}}, tables, 1)
    pieces = [(table, plan[table.name].shards[0]) for table in tables]
    tensors = cache_total = stored = index = on_disk = 0
    for storage, (table, shard) in zip(
        make_storages(pieces, seed=0, device="cpu", options=options), pieces, strict=True
    ):
        assert isinstance(storage, TieredShard)
        slots = storage.cache.num_slots
        record = sum(value[:1].nbytes for value in storage.values.values())
        assert storage.cache.cached_rows().numel() == 0 and slots == (123 if table.name == "third" else slots)
        tensors, cache_total = tensors + slots * record, cache_total + slots * (record + CACHE_SLOT_OVERHEAD_BYTES)
        stored += table.num_embeddings * record * (shard.tier == "cached")
        index += 4 * table.num_embeddings * (shard.tier == "disk")
        on_disk += table.num_embeddings * record * (shard.tier == "disk")
    held = plan_memory_bytes(plan, workload(tables), 1, RunBytes(storage=options), is_cpu=True)["start"]
    assert (
        held["hbm"]["tables"] + held["hbm"]["optimizer_state"] == [cache_total + stored + index]
        and tensors < cache_total
    )
    assert not held["host"]["tables"] + held["host"]["optimizer_state"]
    assert held["disk"]["tables"] + held["disk"]["optimizer_state"] == [MAX_FILE_SIZE_RATIO * on_disk]
    if cache_bytes is not None:  # all except the remainder that is smaller than a row of the tables that share it
        third = 123 * (CACHE_SLOT_OVERHEAD_BYTES + tensors_of(tables[2]))
        assert (
            0
            <= cache_bytes - (cache_total - third) - ROW_INDEX_BYTES * ROWS["wide"][0]
            < 2 * (CACHE_SLOT_OVERHEAD_BYTES + tensors_of(tables[0]))
        )


def tensors_of(table: TableSpec) -> int:
    """Return the bytes of a row with its state."""
    per_element, per_row = table.optimizer.num_states
    return 4 * (table.embedding_dim * (1 + per_element) + per_row)


def test_memory_of_other_tiers_is_separate() -> None:
    """On a GPU the backing store of `cached` and the cache of `disk` are in host memory. A checkpoint copies no rows of
    a disk."""
    tables = made("adam")[:1]
    size = tensors_of(tables[0])
    document = {"tables": {"*": {"sharding": "table_wise", "tier": "cached", "cache_rows": 30}}}
    plan = Plan.from_dict(document, tables, 1)
    held = plan_memory_bytes(plan, workload(tables), 1)["start"]
    both = [held[name]["tables"] + held[name]["optimizer_state"] for name in ("hbm", "host", "disk")]
    assert both == [30 * (size + CACHE_SLOT_OVERHEAD_BYTES), 3_000 * size, 0]
    shard = replace(plan["wide"].shards[0], tier="disk")
    plan = replace(plan, tables=(replace(plan["wide"], shards=(shard,)),))
    held = plan_memory_bytes(plan, workload(tables), 1, RunBytes(saves_from_copies=True))["steady"]
    both = [held[name]["tables"] + held[name]["optimizer_state"] for name in ("hbm", "host", "disk")]
    assert both == [0, 30 * (size + CACHE_SLOT_OVERHEAD_BYTES) + 4 * 3_000, MAX_FILE_SIZE_RATIO * 3_000 * size]
    assert held["host"]["copies"] == [0]


def zipf(num_rows: int, power: float) -> Floats:
    """Return the lookup probability of each row."""
    weights = np.arange(1, num_rows + 1, dtype=float) ** -power
    return weights / weights.sum()


def lrfu_misses(batches: list[Floats], num_rows: int, num_slots: int, half_life: float) -> float:
    """Return the exact misses per batch, over the last third of the batches, of a cache that evicts the rows with the
    smallest sum of (1/2)^(age in half-lives)."""
    scores, is_near, missed = np.zeros(num_rows), np.zeros(num_rows, bool), []
    for ids in batches:
        rows = np.unique(ids)
        missed.append(int((~is_near[rows]).sum()))
        scores *= 0.5 ** (len(ids) / half_life)
        scores[rows] += 1
        is_near[rows] = True
        surplus = int(is_near.sum()) - num_slots
        if surplus > 0:
            others = np.setdiff1d(np.flatnonzero(is_near), rows)
            is_near[others[np.argsort(scores[others])[:surplus]]] = False
    return float(np.mean(missed[2 * len(missed) // 3 :]))


def drawn(chances: Floats, size: int, count: int) -> list[Floats]:
    random = np.random.default_rng(4)
    ends = np.cumsum(chances)
    return [np.minimum(np.searchsorted(ends, random.random(size)), len(chances) - 1) for _ in range(count)]


@pytest.mark.parametrize("power", [0.9, 1.2])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_misses_are_those_of_an_exact_cache(power: float, share: float) -> None:
    num_rows, size = 6_000, 200
    chances, cache_rows = zipf(num_rows, power), int(share * num_rows)
    batches = drawn(chances, size, 500)
    exact = lrfu_misses(batches, num_rows, cache_rows, SHORT_HALF_LIFE * cache_rows)
    one = np.ones((1, num_rows))
    predicted = cache_misses(one, size * chances[None], np.array([float(cache_rows)]), np.array([float(size)]))
    assert predicted[0] == pytest.approx(exact, rel=0.06)
    # The histogram has no single rows, and few details of rare ones.
    counted = FeatureStatistics(num_rows)
    counted.add_window(np.concatenate(batches)[:40_000], 40_000)
    reuse = replace(counted.result().reuse, window_samples=40_000)
    tables = (TableSpec(name="t", num_embeddings=num_rows, embedding_dim=16),)
    work = replace(workload(tables), batch_size=size, loads={"t": FeatureLoad(reuse=reuse)})
    loads = WorkloadLoads(work)
    pieces = ShardArrays.from_values(0, (0, num_rows), (0, 16), TIERS.index("disk"), cache_rows)
    assert loads.shard_loads(pieces).tier_misses[0] == pytest.approx(exact, rel=0.12)
    halves = ShardArrays.from_values(0, ([0, 3_000], [3_000, 6_000]), (0, 16), TIERS.index("disk"), cache_rows // 2)
    assert loads.shard_loads(halves).tier_misses.sum() == pytest.approx(
        loads.shard_loads(pieces).tier_misses[0], rel=1e-6
    )


def test_equally_likely_rows_are_missed_in_proportion() -> None:
    loads = WorkloadLoads(replace(workload(made("sgd")), batch_size=500))
    pieces = ShardArrays.from_values(1, (0, 5_000), (0, 4), TIERS.index("cached"), [500, 2_500, 4_900, 5_000])
    distinct = 5_000 * -np.expm1(500 * np.log1p(-1 / 5_000))
    expected = distinct * np.array([0.9, 0.5, 0.02, 0.0])
    assert loads.shard_loads(pieces).tier_misses == pytest.approx(expected, rel=0.03, abs=1e-9)


def test_a_few_popular_rows_stay_cached() -> None:
    """The number of other slots does not matter. With too few slots, popular rows are missed."""
    counted = FeatureStatistics(100_000)
    counted.add_window(np.random.default_rng(0).choice([7, 77, 777], 32_768, p=[0.6, 0.3, 0.1]), 32_768)
    load = FeatureLoad(reuse=replace(counted.result().reuse, window_samples=32_768))
    table = replace(made("sgd")[0], num_embeddings=100_000)
    loads = WorkloadLoads(replace(workload((table,)), batch_size=2_048, loads={table.name: load}))
    misses = loads.shard_loads(
        ShardArrays.from_values(0, (0, 100_000), (0, 32), TIERS.index("disk"), [2, 8, 500])
    ).tier_misses
    assert 0.5 < misses[0] <= 3 and misses[1:] == pytest.approx([0, 0], abs=0.01)


def test_gamma_law_of_whole_shapes() -> None:
    x = np.logspace(-3, 1.5, 50)
    for shape in (1, 2, 5):
        exact = 1 - np.exp(-x) * sum(x**k / math.factorial(k) for k in range(shape))
        assert gamma_cdf(np.full(50, float(shape)), x) == pytest.approx(exact, abs=0.004)


def skewed(cache_bytes: int | None, **limits: float) -> tuple[Workload, RunBytes]:
    """Return two tables of equal bytes, of which only one has popular rows."""
    tables = (made("adam")[0], replace(made("adam")[0], name="even"))
    counted = FeatureStatistics(3_000)
    counted.add_window(np.concatenate(drawn(zipf(3_000, 1.2), 64, 512)), 32_768)
    even = FeatureStatistics(3_000)
    even.add_window(np.concatenate(drawn(zipf(3_000, 0.0), 64, 512)), 32_768)
    statistics = {"wide": counted, "even": even}
    loads = {
        name: FeatureLoad(reuse=replace(of.result().reuse, window_samples=32_768)) for name, of in statistics.items()
    }
    options = StorageOptions(cache_bytes=cache_bytes, **limits)
    return replace(workload(tables), loads=loads), RunBytes(storage=options)


ON_DISK = {"tables": {"*": {"sharding": "table_wise", "tier": "disk"}}}


def test_cache_memory_goes_to_the_rows_that_save_most() -> None:
    """Compares with every split of the memory in steps of a hundredth."""
    cache_bytes = 1_000_000
    work, run = skewed(cache_bytes)
    model, topology = documented_cost_model("cpu"), Topology()
    plan = allocate_cache_rows(Plan.from_dict(ON_DISK, work.tables, 1), work, topology, model, run)
    cache_rows = [plan[name].shards[0].cache_rows or 0 for name in ("wide", "even")]
    one = CACHE_SLOT_OVERHEAD_BYTES + tensors_of(work.tables[0])
    assert 0 <= cache_bytes - 2 * 4 * 3_000 - one * sum(cache_rows) < 2 * one
    loads, tier = WorkloadLoads(work), TIERS.index("disk")

    def misses(counts: list[int]) -> float:
        return float(
            loads.shard_loads(ShardArrays.from_values([0, 1], (0, 3_000), (0, 32), tier, counts)).tier_misses.sum()
        )

    splits = [
        [int(part * sum(cache_rows)), sum(cache_rows) - int(part * sum(cache_rows))]
        for part in np.linspace(0.1, 0.9, 81)
    ]
    best = min(misses(split) for split in splits if min(split) > 200)
    assert misses(cache_rows) <= 1.02 * best < 0.95 * misses([sum(cache_rows) // 2, sum(cache_rows) // 2])


def test_advised_cache_rows_and_unchanged_plans() -> None:
    work, run = skewed(None)
    model, topology = documented_cost_model("cpu"), Topology()
    plan = Plan.from_dict(ON_DISK, work.tables, 1)
    advised = allocate_cache_rows(plan, work, topology, model, run)
    steps = [
        predict(allocate_cache_rows(plan, work, topology, model, skewed(size)[1]), work, topology, model).step_s
        for size in (200_000, 500_000, 1_000_000, 5_000_000)
    ]
    assert steps == sorted(steps, reverse=True)
    assert predict(advised, work, topology, model).step_s <= 1.04 * steps[-1]
    unknown = replace(work, loads={})
    assert allocate_cache_rows(plan, unknown, topology, model, run) == plan
    written = Plan.from_dict({"tables": {"*": {**ON_DISK["tables"]["*"], "cache_rows": 77}}}, work.tables, 1)
    assert allocate_cache_rows(written, work, topology, model, run) == written


def test_reads_overlap_with_the_step_up_to_its_length() -> None:
    work, run = skewed(200_000)
    plan = allocate_cache_rows(
        Plan.from_dict(ON_DISK, work.tables, 1), work, Topology(), documented_cost_model("cpu"), run
    )
    model = documented_cost_model("cpu")
    model = replace(model, tiers=replace(model.tiers, disk_row_s=1e-7))
    free = predict(plan, work, Topology(), model, run=run)
    missed = sum(free.cache_misses.values())
    assert 0 < missed < 128 and free.step_s > free.disk_s.max()
    for limit in (10 * missed / free.step_s, 0.5 * missed / free.step_s):
        prediction = predict(plan, work, Topology(), model, run=skewed(200_000, max_reads_per_s=limit)[1])
        assert prediction.step_s == pytest.approx(max(free.step_s, prediction.disk_s.max()), rel=1e-9)
        assert prediction.seconds["lookup"][0] - free.seconds["lookup"][0] == pytest.approx(
            prediction.step_s - free.step_s
        )
    assert 0.8 * missed / limit < prediction.disk_s.max() < missed / limit  # a few rows are adjacent in the file


def test_rows_cached_in_host_memory_cross_to_the_gpu_and_back() -> None:
    """All rows of a batch cross without misses. On a CPU rank, and in `cached`, they stay in the memory that trains
    them."""
    table = made("adam")[0]
    loads = WorkloadLoads(replace(workload((table,)), batch_size=500))
    distinct = 3_000 * -np.expm1(500 * np.log1p(-1 / 3_000))
    for device, tier, num_bytes in (
        ("a100", "disk", 2 * tensors_of(table) * distinct),
        ("a100", "cached", 0.0),
        ("cpu", "disk", 0.0),
    ):
        model, base = documented_cost_model(device), CostModel(device=device).tiers
        base = replace(base, host_bytes_per_s=model.tiers.host_bytes_per_s)
        cached, resident = (
            sum(
                operator_seconds(
                    replace(model, tiers=base),
                    loads.shard_loads(ShardArrays.from_values(0, (0, 3_000), (0, 32), TIERS.index(of), 3_000)),
                )
            )
            for of in (tier, "hbm")
        )
        assert (cached - resident)[0] == pytest.approx(num_bytes / base.host_bytes_per_s, rel=0.02, abs=1e-12)


def test_a_rank_with_a_cache_pays_for_the_call_once() -> None:
    tables = made("adam")
    cached = {"sharding": "table_wise", "tier": "cached", "cache_rows": 300, "ranks": [1]}
    document = {"tables": {"wide": cached, "third": cached, "narrow": {"sharding": "table_wise", "ranks": [0]}}}
    plan, topology = Plan.from_dict(document, tables, 2), Topology(devices_per_host=2)
    model = documented_cost_model("cpu")
    free = replace(model, tiers=replace(model.tiers, cache_call_s=0.0))
    both = [predict(plan, workload(tables), topology, of).seconds["lookup"] for of in (model, free)]
    assert both[0] - both[1] == pytest.approx([0.0, model.tiers.cache_call_s], abs=1e-12)


@pytest.mark.parametrize("num_rows", [10_000, 30_000])
def test_adjacent_rows_are_read_together(num_rows: int) -> None:
    """Compares with random places in a file."""
    table = replace(made("sgd")[0], num_embeddings=num_rows)
    loads = WorkloadLoads(replace(workload((table,)), batch_size=400))
    load = loads.shard_loads(ShardArrays.from_values(0, (0, num_rows), (0, 32), TIERS.index("disk"), 1_000))
    model = documented_cost_model("cpu")
    tiers = replace(model.tiers, disk_row_s=1.0, disk_bytes_per_s=1e30, disk_write_bytes_per_s=1e30)
    per_row = disk_seconds(replace(model, tiers=tiers), load)[0]
    random, drawn = np.random.default_rng(0), []
    for _ in range(100):
        places = 136 * np.sort(random.choice(int(num_rows / 0.7), round(load.tier_misses[0]), replace=False))
        first, last = places // 512 * 512, -(-(places + 136) // 512) * 512
        drawn.append(1 + np.count_nonzero(first[1:] - last[:-1] > 4096))
    assert per_row == pytest.approx(np.mean(drawn) / load.tier_misses[0], rel=0.05)
    assert disk_seconds(model, load, max_reads_per_s=10.0)[0] == pytest.approx(per_row / 10.0)


def test_tables_too_large_for_memory_are_on_disk() -> None:
    work, _ = skewed(None)
    whole = predict(Plan.from_dict({"tables": {"*": "table_wise"}}, work.tables, 1), work, Topology())
    rows = 3_000 * tensors_of(work.tables[0])
    beside = (whole.peak_bytes("hbm") + whole.peak_bytes("host"))[0] - 2 * rows
    small = Topology(hbm_bytes=int(beside + 1.4 * rows), disk_bytes=10 * rows)
    result = find_plan(work, small)
    tiers = {entry.table: entry.shards[0] for entry in result.plan.tables}
    assert {shard.tier for shard in tiers.values()} == {"hbm", "disk"}
    assert all((shard.cache_rows or 0) > 0 for shard in tiers.values() if shard.tier == "disk")
    held = [phase["hbm"][0] + phase["host"][0] for phase in result.prediction.memory_bytes.values()]
    assert 0.98 * (small.hbm_bytes or 0) < max(held) <= (small.hbm_bytes or 0)
    tied = OptimizerSpec(name="adam", stepped_rows="all")
    with pytest.raises(DoesNotFitError):
        find_plan(replace(work, tables=tuple(replace(table, optimizer=tied) for table in work.tables)), small)


def test_a_disk_is_suggested() -> None:
    tables = tuple(replace(table, num_embeddings=4_000_000) for table in made("adam"))
    topology = Topology(hbm_bytes=2_000_000_000)
    with pytest.raises(DoesNotFitError, match=r"store tables on .* of disk on each host \(disk_bytes; storage.dir"):
        find_plan(workload(tables), topology)
    result = find_plan(workload(tables), replace(topology, disk_bytes=20_000_000_000))
    assert "disk" in {shard.tier for entry in result.plan.tables for shard in entry.shards}


@pytest.mark.parametrize("tier", ["hbm", "cached", "disk"])
@pytest.mark.parametrize("deltas", [False, True])
def test_saves_of_every_policy_and_tier_are_counted(tier: str, deltas: bool) -> None:
    """Uses a million rows of 260 bytes: blocks of 65,536 rows of 268 bytes, and parts of 131,072 rows."""
    optimizer = OptimizerSpec(name="rowwise_adagrad")
    tables = [TableSpec(name="item", num_embeddings=1_000_000, embedding_dim=64, optimizer=optimizer)]
    work = workload(tuple(tables))
    document = {"tables": {"*": {"sharding": "table_wise", "tier": tier}}}
    run = RunBytes(has_deltas=deltas, saves_during_training=True, storage=StorageOptions())
    held = plan_memory_bytes(Plan.from_dict(document, tables, 1), work, 1, run)["checkpoint"]
    block, part, ids = 65_536 * 268, 131_072 * 260, 8 * 65_536
    written = 4 * (block + 16_384 + ids) + deltas * (4 * ids + 3 * 1_000_000 // 8)
    if tier == "disk":
        written += (
            4 * part + 3 * 131_072 * 16
        )  # two in use or read ahead, and those of four blocks, with 16 bytes of index per row
    elif tier == "cached" or deltas:
        written += 5 * block
    assert held["host"]["saving"] == [max(written, (9 if deltas else 6) * block)]
    assert (held["hbm"]["activations"] > 0) == (tier == "disk")  # training continues if nothing is copied
    assert held["host"]["saving"][0] <= 512 << 20
