"""Tests that tables take over chosen rows of a checkpoint, compared with indexing in torch."""

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.simulated import Tables, assert_holds, blank, on_ranks, pieces, random_plan, random_tables, returned
from checkpoint.simulated import some_specs as saved_specs
from meseta.checkpoint import load, save
from meseta.checkpoint.files import layout
from meseta.checkpoint.loading import TableSource
from meseta.checkpoint.row_map import RowMap
from meseta.comm import World
from meseta.errors import MesetaError
from meseta.spec import OptimizerSpec, TableSpec


@pytest.fixture(autouse=True)
def many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have several blocks, and writes skip fsync."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def random_sources(draw: random.Random, num_saved: int, num_rows: int) -> np.ndarray:
    """Return the saved row of each row, or -1: a prefix that keeps its numbers, then a shuffled rest with new rows."""
    kept = draw.randrange(min(num_saved, num_rows) + 1)
    rest = [*range(kept, num_saved), *[-1] * num_rows]
    draw.shuffle(rest)
    return np.array([*range(kept), *rest[: num_rows - kept]], np.int64)


def pairs(row_map: RowMap) -> set[tuple[int, int]]:
    """Return the pairs (saved row, row) of a map, from its parts."""
    entries = [
        (int(one), int(other))
        for source, target in row_map.parts()
        for one, other in zip(np.arange(10_000)[source], np.arange(10_000)[target], strict=True)
    ]
    assert len(entries) == len(set(entries)) == row_map.num_rows
    return set(entries)


@given(
    seed=st.integers(0, 2**32),
    num_saved=st.integers(0, 300),
    num_rows=st.integers(0, 300),
    span=st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted),
)
def test_parts_of_a_map(seed: int, num_saved: int, num_rows: int, span: list[int]) -> None:
    sources = random_sources(random.Random(seed), num_saved, num_rows)
    first, stop = span
    row_map = RowMap.from_sources(sources)
    expected = {(int(source), row) for row, source in enumerate(sources) if source >= 0}
    assert pairs(row_map) == expected
    assert pairs(row_map.to_targets(first, stop)) == {(s, t - first) for s, t in expected if first <= t < stop}
    assert pairs(row_map.from_rows(first, stop)) == {(s - first, t) for s, t in expected if first <= s < stop}


@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32), writers=st.integers(1, 3), readers=st.integers(1, 4), states=st.booleans())
def test_rows_of_other_tables(
    tmp_path_factory: pytest.TempPathFactory, seed: int, writers: int, readers: int, states: bool
) -> None:
    folder, draw = tmp_path_factory.mktemp("rows"), random.Random(seed)
    before = saved_specs()
    saved = random_tables(before, seed)
    plan = random_plan(before, writers, seed)
    [path, *_] = returned(
        on_ranks(
            writers,
            lambda world: save(
                folder,
                world=world,
                step=1,
                plan=plan,
                shards=pieces(before, plan, world.rank, saved),
                dense={},
                state={},
            ),
        )
    )
    specs = [replace(spec, num_embeddings=draw.randint(1, 400)) for spec in before if draw.random() < 0.8]
    specs.append(TableSpec(name="new", num_embeddings=5, embedding_dim=3))
    rows = {spec.name: spec.num_embeddings for spec in before}
    chosen = {
        spec.name: random_sources(draw, rows[spec.name], spec.num_embeddings)
        for spec in specs
        if spec.name in rows and draw.random() < 0.9
    }
    expected: Tables = {}
    for name, values in random_tables(specs, seed=987_654_321).items():  # Those of `blank`.
        expected[name] = values
        if name in chosen:
            source = torch.from_numpy(chosen[name])
            for column in values if states else ["row"]:
                values[column][source >= 0] = saved[name][column][source[source >= 0]]
    sources = {name: TableSource(rows=RowMap.from_sources(rows), states=states) for name, rows in chosen.items()}
    reading = random_plan(specs, readers, seed + 1)

    def read(world: World) -> None:
        shards = blank(specs, reading, world.rank)
        load(path, world=world, shards=shards, sources=sources)
        assert_holds(shards, expected)

    returned(on_ranks(readers, read))


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    [spec] = [spec for spec in saved_specs() if spec.name == "user"]
    plan = random_plan([spec], 1, 0)
    shards = pieces([spec], plan, 0, random_tables([spec], 1))
    path = save(tmp_path, world=World.single(), step=1, plan=plan, shards=shards, dense={}, state={})
    source = TableSource(rows=RowMap.identity(203))
    for other, message in [
        (replace(spec, embedding_dim=24), "embedding_dim 40 there, but 24 in the model; .*--reset user"),
        (replace(spec, dtype="float16"), "dtype float32 there, but float16"),
        (replace(spec, optimizer=OptimizerSpec(name="sgd")), "trained with row optimizer 'adam'.*--load tables,dense"),
    ]:
        shards = blank([other], random_plan([other], 1, 0), 0)
        with pytest.raises(MesetaError, match=message):
            load(path, world=World.single(), shards=shards, sources={"user": source})
    load(path, world=World.single(), shards=shards, sources={"user": replace(source, states=False)})
