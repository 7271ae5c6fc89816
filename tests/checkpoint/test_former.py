"""Tests of checkpoints written before deltas existed, by commit 2f362fb. `former/` has two, one of them with deferred
answers. They load bit for bit, and are still written byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.simulated import assert_holds, blank, on_ranks, pieces, plain_plan, random_tables, returned
from meseta.checkpoint import SaveOptions, compact, compare, load, save, summarize, verify
from meseta.checkpoint.files import layout
from meseta.comm import World
from meseta.spec import OptimizerSpec, TableSpec

FORMER = Path(__file__).with_name("former")
SPECS = [
    TableSpec(name="user", num_embeddings=45, embedding_dim=4, optimizer=OptimizerSpec(name="rowwise_adagrad")),
    TableSpec(
        name="item/..", num_embeddings=9, embedding_dim=2, dtype="bfloat16", optimizer=OptimizerSpec(name="adam")
    ),
]
STATE = {"reader": {"row": 0}, "random": "00ff"}
CARRIED = {6: None, 7: {"ids": torch.arange(3), "pooled": torch.arange(18.0).view(3, 6) / 7}}
CHECKSUMS = {
    6: "06f353f9d9f1a7380c06ea94064cd3fdb9ce71264032e1fd58e7d9e1a9c563b9",
    7: "74d3ea6a07161f49bc4e08f9cf9d89d1f5bc9e8c70e9b49366f29405c42c692c",
}
"""Checksums printed by that version."""


@pytest.mark.parametrize("step", CHECKSUMS)
@pytest.mark.parametrize(("size", "sharding"), [(1, "table_wise"), (2, "row_wise"), (3, "row_wise")])
def test_it_loads_under_any_plan(step: int, size: int, sharding: str) -> None:
    path, plan = FORMER / f"step-{step:09d}", plain_plan(SPECS, size, sharding)
    assert verify(path) == CHECKSUMS[step] == summarize(path).checksum

    def loaded(world: World) -> None:
        shards = blank(SPECS, plan, world.rank)
        checkpoint = load(path, world=world, shards=shards)
        assert_holds(shards, random_tables(SPECS, seed=step))
        assert (checkpoint.step, checkpoint.state) == (step, {**STATE, "reader": {"row": step * 90}})
        assert torch.equal(checkpoint.dense["over.bias"], torch.arange(3.0) / step)
        carried = CARRIED[step]
        assert (checkpoint.prefetched_embeddings is None) == (carried is None)
        for name, tensor in (carried or {}).items():
            assert torch.equal(checkpoint.prefetched_embeddings[name], tensor)  # type: ignore[index]

    returned(on_ranks(size, loaded))


@pytest.mark.parametrize("step", CHECKSUMS)
def test_it_is_written_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A save of the same content writes the same bytes, and so does compacting it."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1024)
    plan, former = plain_plan(SPECS, 1, "table_wise"), FORMER / f"step-{step:09d}"
    shards = pieces(SPECS, plan, 0, random_tables(SPECS, seed=step))
    known = {"step": step, "plan": plan, "state": {**STATE, "reader": {"row": step * 90}}}
    dense, options = {"over.bias": torch.arange(3.0) / step}, SaveOptions(prefetched_embeddings=CARRIED[step])
    path = save(tmp_path, world=World.single(), shards=shards, dense=dense, options=options, **known)  # type: ignore[arg-type]
    for written in (path, compact(former, tmp_path / "compact")):
        files = sorted(file.relative_to(former) for file in former.rglob("*") if file.is_file())
        assert files == sorted(file.relative_to(written) for file in written.rglob("*") if file.is_file())
        assert [(written / file).read_bytes() for file in files] == [(former / file).read_bytes() for file in files]
        assert list(compare(written, former)) == []
