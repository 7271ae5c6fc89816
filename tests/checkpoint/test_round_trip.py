"""Tests that a checkpoint loads bit for bit under any plan and number of ranks, and that its files do not depend on
them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.simulated import (
    Tables,
    assert_holds,
    blank,
    on_ranks,
    pieces,
    plain_plan,
    random_plan,
    random_tables,
    returned,
    some_specs,
)
from meseta.checkpoint import LoadedCheckpoint, load, save, verify
from meseta.checkpoint.files import layout
from meseta.comm import World
from meseta.spec import OptimizerSpec, Plan, TableSpec

DENSE = {
    "over.0.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "step": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "mask": torch.tensor([True, False]),
    "half": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).t(),
}
STATE = {
    "reader": {"epoch": 1, "row": 12_345},
    "schedule": {"factor": 0.1},
    "windows": [[1, 2.5], []],
    "random": "ff00",
}


@pytest.fixture(autouse=True)
def many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have several blocks, and writes skip fsync."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def save_on(parent: Path, plan: Plan, specs: list[TableSpec], tables: Tables, **other: Any) -> Path:
    arguments = {"step": 5, "dense": DENSE, "state": STATE, **other}
    paths = returned(
        on_ranks(
            plan.num_ranks,
            lambda world: save(
                parent, world=world, plan=plan, shards=pieces(specs, plan, world.rank, tables), **arguments
            ),
        )
    )
    assert set(paths) == {parent / f"step-{arguments['step']:09d}"}
    return paths[0]


def load_on(path: Path, plan: Plan, specs: list[TableSpec], tables: Tables) -> LoadedCheckpoint:
    def run(world: World) -> LoadedCheckpoint:
        shards = blank(specs, plan, world.rank)
        loaded = load(path, world=world, shards=shards)
        assert_holds(shards, tables)
        return loaded

    return returned(on_ranks(plan.num_ranks, run))[0]


def files(path: Path) -> dict[str, bytes]:
    """Return the content by path, except for the manifest, which names the plan."""
    return {
        str(f.relative_to(path)): f.read_bytes()
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != "manifest.json"
    }


@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_plan_to_any_plan(tmp_path_factory: pytest.TempPathFactory, seed: int, writers: int, readers: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    specs = some_specs()
    tables = random_tables(specs, seed)
    first, second = random_plan(specs, writers, seed), random_plan(specs, readers, seed + 1)
    path = save_on(folder / "first", first, specs, tables)
    loaded = load_on(path, second, specs, tables)
    again = save_on(folder / "second", second, specs, tables)
    assert files(path) == files(again)
    assert load_on(again, first, specs, tables).manifest["checksum"] == loaded.manifest["checksum"] == verify(path)
    assert loaded.manifest["plan"] == first.to_dict()


@pytest.mark.parametrize("sharding", ["data_parallel", "table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_plain_plans_on_one_rank_after(tmp_path: Path, sharding: str, num_ranks: int) -> None:
    specs = some_specs()
    tables = random_tables(specs, seed=3)
    path = save_on(tmp_path / "many", plain_plan(specs, num_ranks, sharding), specs, tables)
    loaded = load_on(path, plain_plan(specs, 1, "table_wise"), specs, tables)
    alone = save_on(tmp_path / "alone", plain_plan(specs, 1, "table_wise"), specs, tables)
    assert files(path) == files(alone)
    assert len(files(path)) > 10
    assert loaded.manifest["checksum"] == verify(alone)


def test_one_process_fills_the_shards_of_every_rank(tmp_path: Path) -> None:
    specs = some_specs()
    tables = random_tables(specs, seed=4)
    path = save_on(tmp_path, random_plan(specs, 3, 0), specs, tables)
    plan = random_plan(specs, 4, 1)
    shards = [piece for rank in range(4) for piece in blank(specs, plan, rank)]
    load(path, world=World.single(), shards=shards)
    assert_holds(shards, tables)


def test_dense_and_state_come_back(tmp_path: Path) -> None:
    specs = some_specs()
    plan = plain_plan(specs, 2, "row_wise")
    tables = random_tables(specs, seed=5)
    loaded = load_on(save_on(tmp_path, plan, specs, tables), plan, specs, tables)
    assert loaded.step == 5
    assert loaded.state == STATE
    assert loaded.manifest["reader"] == STATE["reader"]
    assert list(loaded.dense) == sorted(loaded.dense) or set(loaded.dense) == set(DENSE)
    for name, tensor in DENSE.items():
        assert loaded.dense[name].dtype == tensor.dtype
        assert torch.equal(loaded.dense[name], tensor)


def test_nothing_but_one_table(tmp_path: Path) -> None:
    specs = [TableSpec(name="t", num_embeddings=1, embedding_dim=3)]
    plan = plain_plan(specs, 3, "row_wise")  # two ranks have no shard
    tables = random_tables(specs, seed=6)
    loaded = load_on(save_on(tmp_path, plan, specs, tables, dense={}, state={}), plan, specs, tables)
    assert (loaded.dense, loaded.state) == ({}, {})


def test_dense_tensors_may_share_memory(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    specs = some_specs()
    plan = plain_plan(specs, 1, "table_wise")
    tables = random_tables(specs, seed=7)
    path = save_on(tmp_path, plan, specs, tables, dense={"a": shared, "b": shared[1:]})
    dense = load_on(path, plan, specs, tables).dense
    assert torch.equal(dense["a"], shared) and torch.equal(dense["b"], shared[1:])


def test_the_checksum_names_the_model_and_nothing_else(tmp_path: Path) -> None:
    specs = some_specs()
    plan = plain_plan(specs, 1, "table_wise")
    tables = random_tables(specs, seed=8)
    first = verify(save_on(tmp_path / "a", plan, specs, tables))
    assert verify(save_on(tmp_path / "b", plan, specs, tables, step=9, state={"other": 1})) == first
    assert verify(save_on(tmp_path / "c", plan, specs, tables, dense={"step": torch.tensor(8)})) != first
    for name in tables["user"]:
        changed = {**tables, "user": {k: t.clone() for k, t in tables["user"].items()}}
        changed["user"][name].view(torch.uint8).view(-1)[-1] ^= 1
        assert verify(save_on(tmp_path / name, plan, specs, changed)) != first


def test_learning_rate_may_change(tmp_path: Path) -> None:
    old = [TableSpec(name="t", num_embeddings=9, embedding_dim=4, optimizer=OptimizerSpec(name="adagrad", lr=0.1))]
    new = [TableSpec(name="t", num_embeddings=9, embedding_dim=4, optimizer=OptimizerSpec(name="adagrad", lr=0.2))]
    plan = plain_plan(old, 1, "table_wise")
    tables = random_tables(old, seed=9)
    load_on(save_on(tmp_path, plan, old, tables), plan, new, tables)


def test_replicas_are_written_from_the_first(tmp_path: Path) -> None:
    specs = [TableSpec(name="t", num_embeddings=300, embedding_dim=16)]
    plan = plain_plan(specs, 3, "data_parallel")
    by_rank = [random_tables(specs, seed) for seed in range(3)]
    paths = on_ranks(
        3,
        lambda world: save(
            tmp_path,
            world=world,
            step=1,
            plan=plan,
            shards=pieces(specs, plan, world.rank, by_rank[world.rank]),
            dense={},
            state={},
        ),
    )
    load_on(returned(paths)[0], plan, specs, by_rank[0])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("width", [1, 16, 64, 128, 1000])
def test_full_size_blocks_have_16_to_32_mib(monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> None:
    monkeypatch.undo()
    spec = TableSpec(name="t", num_embeddings=8, embedding_dim=width, optimizer=OptimizerSpec(name=name))
    piece = blank([spec], plain_plan([spec], 1, "table_wise"), 0)[0]
    made = layout.TableLayout.from_values(spec, piece.values)
    assert 16 << 20 <= made.schema.block_rows * made.schema.row_bytes <= 32 << 20
