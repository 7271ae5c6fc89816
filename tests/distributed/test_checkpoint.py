"""Checkpoints over gloo, saved on 1, 2 and 4 ranks and loaded on any other number under another plan."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from checkpoint import saver
from checkpoint.simulated import assert_holds, blank, pieces, plain_plan, random_plan, random_tables, some_specs
from meseta.checkpoint import load, save
from meseta.checkpoint.files import layout
from meseta.comm import World
from meseta.spec import MesetaError, Plan

from .pool import RankPool

SPECS = some_specs()
TABLES = random_tables(SPECS, seed=11)
SEEDS = {1: 5, 2: 6, 4: 7}


def plan_for(num_ranks: int) -> Plan:
    return random_plan(SPECS, num_ranks, SEEDS[num_ranks])


def save_here(parent: Path, plan: Plan) -> Path:
    """Save a checkpoint. Runs on every rank."""
    world = World.current()
    shards = pieces(SPECS, plan, world.rank, TABLES)
    with patch.object(layout, "BLOCK_BYTES", 16_384):  # the processes of the ranks are used by other tests too
        return save(parent, world=world, step=3, plan=plan, shards=shards, dense=saver.DENSE, state={"position": 17})


def load_here(path: Path, plan: Plan) -> tuple[str, dict]:
    """Load a checkpoint and return (checksum, state). Runs on every rank."""
    world = World.current()
    shards = blank(SPECS, plan, world.rank)
    loaded = load(path, world=world, shards=shards)
    assert_holds(shards, TABLES)
    return loaded.manifest["checksum"], loaded.state


def refused_here(path: Path, plan: Plan) -> str:
    """Return the error of `load`. Runs on every rank."""
    with pytest.raises(MesetaError) as refusal:
        load_here(path, plan)
    return str(refusal.value)


def files(path: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != "manifest.json"
    }


@pytest.fixture
def run(ranks: Callable[[int], RankPool]) -> Callable:
    """Return a function that runs another one on several ranks, or in this process for one rank."""
    return lambda size, function, *args: [function(*args)] if size == 1 else ranks(size).run(function, *args)


def test_any_number_of_ranks_to_any_other(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    saved = {size: run(size, save_here, tmp_path / str(size), plan_for(size)) for size in (1, 2, 4)}
    assert all(set(paths) == {tmp_path / str(size) / "step-000000003"} for size, paths in saved.items())
    assert files(saved[1][0]) == files(saved[2][0]) == files(saved[4][0])
    assert len(files(saved[1][0])) > 10
    results = [
        result
        for writers in saved
        for readers in saved
        for result in run(readers, load_here, saved[writers][0], plan_for(readers))
    ]
    checksum = results[0][0]
    assert results == [(checksum, {"position": 17})] * len(results)


def test_a_missing_block_stops_every_rank(run: Callable, tmp_path: Path) -> None:
    """With row_wise shards only the rank that needs the block sees that it is missing."""
    plan = plain_plan(SPECS, 4, "row_wise")
    path = run(4, save_here, tmp_path, plan)[0]
    (path / "tables/user/block-00000.arrow").unlink()
    messages = run(4, refused_here, path, plan)
    assert len(set(messages)) == 1
    assert "rank 0: checkpoint file" in messages[0] and "tables/user/block-00000.arrow" in messages[0]
