"""Rows that lie near: how many of each piece, what they take, and which of a batch's are among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meseta.planner.cost.memory import RunBytes, plan_memory
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec, Workload
from meseta.spec.tiers import FILE_SHARE, SLOT_BYTES, StorageOptions
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
@pytest.mark.parametrize("near_bytes", [None, 200_000])
def test_near_rows_are_counted_as_storage_allots_them(tmp_path: Path, optimizer: str, near_bytes: int | None) -> None:
    tables, options = made(optimizer), StorageOptions(dir=tmp_path, near_bytes=near_bytes)
    places = {"wide": {"tier": "disk"}, "narrow": {"tier": "cached"}, "third": {"tier": "disk", "near_rows": 123}}
    plan = Plan.from_dict({"tables": {n: {"sharding": "table_wise", **of} for n, of in places.items()}}, tables, 1)
    pieces = [(table, plan[table.name].shards[0]) for table in tables]
    tensors = near = far = index = on_disk = 0
    for storage, (table, shard) in zip(
        make_storages(pieces, seed=0, device="cpu", options=options), pieces, strict=True
    ):
        assert isinstance(storage, TieredShard)
        slots = storage._slots.num_slots
        record = sum(value[:1].nbytes for value in storage.values.values())
        assert storage.near_rows().numel() == 0 and slots == (123 if table.name == "third" else slots)
        tensors, near = tensors + slots * record, near + slots * (record + SLOT_BYTES)
        far += table.num_embeddings * record * (shard.tier == "cached")
        index += 4 * table.num_embeddings * (shard.tier == "disk")
        on_disk += table.num_embeddings * record * (shard.tier == "disk")
    held = plan_memory(plan, workload(tables), 1, RunBytes(storage=options), is_cpu=True)["start"]
    assert held["hbm"]["tables"] + held["hbm"]["optimizer_state"] == [near + far + index] and tensors < near
    assert not held["host"]["tables"] + held["host"]["optimizer_state"]
    assert held["disk"]["tables"] + held["disk"]["optimizer_state"] == [FILE_SHARE * on_disk]
    if near_bytes is not None:  # all but what a row that does not fit in leaves, of those that share it
        third = 123 * (SLOT_BYTES + tensors_of(tables[2]))
        assert 0 <= near_bytes - (near - third) < 2 * (SLOT_BYTES + tensors_of(tables[0]))


def tensors_of(table: TableSpec) -> int:
    """Bytes of a row with its state."""
    per_element, per_row = table.optimizer.num_states
    return 4 * (table.embedding_dim * (1 + per_element) + per_row)


def test_memory_elsewhere_is_told_apart() -> None:
    """On a GPU far rows of 'cached' lie in DRAM, and near rows of 'disk'; a copy for a save is made of no disk."""
    tables = made("adam")[:1]
    size = tensors_of(tables[0])
    document = {"tables": {"*": {"sharding": "table_wise", "tier": "cached", "near_rows": 30}}}
    plan = Plan.from_dict(document, tables, 1)
    held = plan_memory(plan, workload(tables), 1)["start"]
    both = [held[name]["tables"] + held[name]["optimizer_state"] for name in ("hbm", "host", "disk")]
    assert both == [30 * (size + SLOT_BYTES), 3_000 * size, 0]
    shard = replace(plan["wide"].shards[0], tier="disk")
    plan = replace(plan, tables=(replace(plan["wide"], shards=(shard,)),))
    held = plan_memory(plan, workload(tables), 1, RunBytes(copies=True))["steady"]
    both = [held[name]["tables"] + held[name]["optimizer_state"] for name in ("hbm", "host", "disk")]
    assert both == [0, 30 * (size + SLOT_BYTES) + 4 * 3_000, FILE_SHARE * 3_000 * size]
    assert held["host"]["copies"] == [0]
