"""Tests that deltas hold the content of full checkpoints under any plan, policy and number of ranks, file by file."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.simulated import (
    Tables,
    assert_holds,
    blank,
    many_files,
    on_ranks,
    pieces,
    random_plan,
    random_tables,
    returned,
    some_specs,
)
from meseta.checkpoint import (
    SaveOptions,
    compact,
    compare,
    latest_complete,
    list_checkpoints,
    load,
    prune,
    save,
    summarize,
    verify,
)
from meseta.checkpoint.files import layout
from meseta.checkpoint.policy import choose_base, is_cumulative
from meseta.comm import World
from meseta.ops.row_marks import Consumer
from meseta.spec import Plan
from meseta.storage import TableStorage
from sampling import sample

POLICIES = ("one_shot", "consecutive", "intermittent", "rolling")
SPECS = some_specs()
STATE = {"reader": {"row": 3}, "figures": [1, 2]}


@pytest.fixture(autouse=True)
def many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def dense_of(step: int) -> dict[str, torch.Tensor]:
    return {"bias": torch.arange(4.0) + step}


def change(tables: Tables, seed: int) -> tuple[Tables, dict[str, torch.Tensor]]:
    """Return tables with other bits in random rows, of some tables all and of others none, and these rows."""
    rng, other = random.Random(seed), random_tables(SPECS, seed)
    changed = {}
    for spec in SPECS:
        share = rng.choice([0.0, 0.02, 0.3, 1.0])
        rows = [row for row in range(spec.num_embeddings) if rng.random() < share]
        changed[spec.name] = torch.tensor(rows, dtype=torch.int64)
    mixed = {
        name: {key: value.index_copy(0, changed[name], other[name][key][changed[name]]) for key, value in parts.items()}
        for name, parts in tables.items()
    }
    return mixed, changed


def marked(piece: TableStorage, rows: dict[str, torch.Tensor]) -> TableStorage:
    """Return the piece after marking its rows among `rows`, which index the whole table."""
    first, stop = piece.shard.rows
    here = rows[piece.spec.name]
    piece.marks.add(here[(here >= first) & (here < stop)] - first)
    return piece


class Run:
    """Saves of one policy. Marks are kept by table, and set on new pieces for each save under any plan."""

    def __init__(self, parent: Path, policy: str, max_chain: int) -> None:
        self.parent, self.policy, self.max_chain = parent, policy, max_chain
        self.path: Path | None = None
        self.changed = {spec.name: torch.empty(0, dtype=torch.int64) for spec in SPECS}

    def save(self, step: int, plan: Plan, tables: Tables, changed: dict[str, torch.Tensor]) -> Path:
        for name, rows in changed.items():
            self.changed[name] = torch.cat([self.changed[name], rows]).unique()
        base = choose_base(self.path, self.policy, self.max_chain) if self.path is not None else None  # type: ignore[arg-type]

        def run(world: World) -> Path:
            shards: list[Any] = [marked(piece, self.changed) for piece in pieces(SPECS, plan, world.rank, tables)]
            known = base if world.rank == 0 or base is None else base.for_other_ranks()
            if known is not None:
                shards = [
                    p.select(known.select_rows(p.shard, p.marks.marked_set(Consumer.CHECKPOINTS))) for p in shards
                ]
            fixed = {"step": step, "plan": plan, "dense": dense_of(step), "state": STATE}
            return save(self.parent, world=world, shards=shards, options=SaveOptions(base=known), **fixed)

        self.path = returned(on_ranks(plan.num_ranks, run))[0]
        if base is None or not is_cumulative(self.policy):
            self.changed = {name: rows[:0] for name, rows in self.changed.items()}
        return self.path


def whole(parent: Path, step: int, plan: Plan, tables: Tables) -> Path:
    def run(world: World) -> Path:
        fixed = {"step": step, "plan": plan, "dense": dense_of(step), "state": STATE}
        return save(parent, world=world, shards=pieces(SPECS, plan, world.rank, tables), **fixed)

    return returned(on_ranks(plan.num_ranks, run))[0]


CASES = [(policy, max_chain, seed) for policy in POLICIES for max_chain in (2, 3, 5) for seed in range(5)]


@pytest.mark.parametrize("case", sample(CASES, 1, seed=2001))
def test_a_delta_holds_what_a_whole_one_does(tmp_path: Path, case: tuple[str, int, int]) -> None:
    policy, max_chain, seed = case
    run, rng = Run(tmp_path / "deltas", policy, max_chain), random.Random(f"{policy} {max_chain} {seed}")
    tables, changed = random_tables(SPECS, seed), {}
    num_deltas = 0
    for step in range(1, 7):
        plan = random_plan(SPECS, rng.choice([1, 2, 4]), rng.randrange(1 << 30))
        path = run.save(step, plan, tables, changed)
        plain = whole(tmp_path / "whole", step, plan, tables)
        made = compact(path, tmp_path / "compact")
        assert many_files(made) == many_files(plain)
        assert verify(path) == json.loads((plain / "manifest.json").read_text())["checksum"]
        assert list(compare(path, plain)) == []
        summary = summarize(path)
        num_deltas += summary.policy is not None
        assert summary.longest_chain <= max_chain and (summary.policy in (None, policy))
        assert summary.policy is None or len(many_files(path)) <= len(many_files(plain))
        other = random_plan(SPECS, rng.choice([1, 2, 3]), step)

        def restored(world: World, path: Path = path, other: Plan = other, tables: Tables = tables) -> None:
            shards = blank(SPECS, other, world.rank)
            load(path, world=world, shards=shards, mark_changes_since_full=is_cumulative(policy))
            assert_holds(shards, tables)
            for piece in shards:
                rows = piece.marks.marked_rows(Consumer.CHECKPOINTS) + piece.shard.rows[0]
                held = run.changed[piece.spec.name]
                first, stop = piece.shard.rows
                assert torch.equal(rows, held[(held >= first) & (held < stop)])

        returned(on_ranks(other.num_ranks, restored))
        prune(run.parent, keep_last=2)
        assert latest_complete(run.parent) == path
        assert all(listed.problem == "" for listed in list_checkpoints(run.parent))
        assert len(list_checkpoints(run.parent)) == min(step, 2)
        tables, changed = change(tables, 10 * seed + step)
    assert num_deltas >= 3
