"""Tests of quantized rows that are saved and restored repeatedly: their error stays below the bound, and untouched rows
stop changing."""

from __future__ import annotations

import json
import os
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.simulated import (
    Tables,
    assert_holds,
    blank,
    many_files,
    on_ranks,
    pieces,
    plain_plan,
    random_plan,
    random_tables,
    returned,
    some_specs,
)
from meseta.checkpoint import DamagedCheckpoint, SaveOptions, compact, load, save, summarize, verify
from meseta.checkpoint.files import digest, layout
from meseta.checkpoint.manifest import read_manifest
from meseta.checkpoint.policy import DeltaBase, choose_base
from meseta.comm import World
from meseta.config.row_bits import ROW_BIT_WIDTHS, RowBits
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import Plan, TableSpec
from meseta.spec.tiers import StorageOptions
from meseta.storage import make_storages
from sampling import sample
from source_tree import ROOT

SPECS = some_specs()
EXACT = ("item/..", "..", "wide")
"""Tables with NaNs in most blocks, of one column, or in float64, for which codes are unsuitable or not shorter."""
read_table = runpy.run_path(str(ROOT / "examples/02_read_checkpoint.py"))["read_table"]


@pytest.fixture(autouse=True)
def many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def numbers(seed: int) -> Tables:
    """Return normal numbers, or random bits for tables of EXACT."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: of
        if name in EXACT
        else {key: torch.randn(t.shape, generator=generator).to(t.dtype) for key, t in of.items()}
        for name, of in random_tables(SPECS, 1).items()
    }


def saved(
    parent: Path, step: int, plan: Plan, tables: Tables, bits: RowBits, base: DeltaBase | None, changed: dict[str, Any]
) -> Path:
    """Save on the ranks of the plan. With a base, only changed rows are saved."""

    def run(world: World) -> Path:
        shards: list[Any] = pieces(SPECS, plan, world.rank, tables)
        known = base if world.rank == 0 or base is None else base.for_other_ranks()
        if known is not None:
            for at, piece in enumerate(shards):
                (first, stop), rows = piece.shard.rows, changed[piece.spec.name]
                of_piece = RowSet(piece.shard.num_rows)
                of_piece.add(rows[(rows >= first) & (rows < stop)] - first)
                shards[at] = piece.select(known.select_rows(piece.shard, of_piece))
        options = SaveOptions(base=known, bits={spec.name: bits for spec in SPECS})
        fixed = {"step": step, "plan": plan, "dense": {"bias": torch.ones(2)}, "state": {}}
        return save(parent, world=world, shards=shards, options=options, **fixed)

    return returned(on_ranks(plan.num_ranks, run))[0]


def assert_near(actual: np.ndarray, expected: np.ndarray, error: float) -> None:
    """Check the error of finite numbers, and that other numbers are unchanged."""
    finite = np.isfinite(expected)
    assert np.abs(actual[finite] - expected[finite]).max(initial=0) <= error
    np.testing.assert_array_equal(actual[~finite], expected[~finite])


CASES = [
    (policy, bits, seed) for policy in (None, "one_shot", "rolling") for bits in ROW_BIT_WIDTHS for seed in range(4)
]


@pytest.mark.parametrize("case", sample(CASES, 1, seed=2002))
def test_repeated_saves_and_restores(tmp_path: Path, case: tuple[str | None, RowBits, int]) -> None:
    policy, bits, seed = case
    rng, tables, path = random.Random(seed), numbers(seed), tmp_path
    changed = {spec.name: torch.arange(spec.num_embeddings) for spec in SPECS}
    since_whole = {name: rows[:0] for name, rows in changed.items()}
    for step in range(1, 5):
        base = None if policy is None or step == 1 else choose_base(path, policy, 3, dict.fromkeys(tables, bits))  # type: ignore[arg-type]
        since_whole = {name: torch.cat([rows, changed[name]]).unique() for name, rows in since_whole.items()}
        plan = random_plan(SPECS, rng.choice([1, 2, 4]), rng.randrange(1 << 30))
        path = saved(tmp_path, step, plan, tables, bits, base, since_whole if policy == "one_shot" else changed)
        if base is None:
            since_whole = {name: rows[:0] for name, rows in since_whole.items()}
        manifest = read_manifest(path)
        assert manifest["features"] == ["quantised"] if base is None else ["deltas", "quantised"]
        assert set(manifest["quantised"]) - {"item/.."} == set(tables) - set(EXACT)
        restored = {name: {key: torch.empty_like(t) for key, t in of.items()} for name, of in tables.items()}
        for name, of in tables.items():
            table = read_table(path, manifest["tables"][name])
            for key, exact in of.items():
                value = torch.from_numpy(table[key]).to(exact.dtype)
                restored[name][key] = value
                error = manifest["quantised"].get(name, {}).get(key)
                if error is None:
                    assert torch.equal(value.view(torch.uint8), exact.view(torch.uint8))
                else:
                    assert_near(value.double().numpy(), exact.double().numpy(), error)
                still = np.setdiff1d(np.arange(len(exact)), changed[name].numpy())
                assert torch.equal(value[still].view(torch.uint8), exact[still].view(torch.uint8))
        other = random_plan(SPECS, rng.choice([1, 2, 4]), step)

        def loaded(world: World, path: Path = path, other: Plan = other, restored: Tables = restored) -> None:
            shards = blank(SPECS, other, world.rank)
            load(path, world=world, shards=shards)
            assert_holds(shards, restored)

        returned(on_ranks(other.num_ranks, loaded))
        exact_copy = compact(path, tmp_path / "compact")
        assert verify(path) == verify(exact_copy) == read_manifest(exact_copy)["checksum"]
        changed = {
            spec.name: torch.tensor(
                sorted(rng.sample(range(spec.num_embeddings), spec.num_embeddings // 5)), dtype=torch.int64
            )
            for spec in SPECS
        }
        tables = {
            name: {
                key: t.index_copy(0, changed[name], numbers(seed + step)[name][key][changed[name]])
                for key, t in of.items()
            }
            for name, of in restored.items()
        }


def test_files_follow_from_tables_alone(tmp_path: Path) -> None:
    tables = numbers(5)
    plans = [plain_plan(SPECS, 1, "table_wise"), *(random_plan(SPECS, ranks, 7) for ranks in (2, 4))]
    saves = [saved(tmp_path / str(n), 3, plan, tables, 4, None, {}) for n, plan in enumerate(plans)]
    files = [{name: content for name, content in many_files(path).items() if name != "manifest.json"} for path in saves]
    assert files[0] == files[1] == files[2]
    tables_of = [json.loads((path / "manifest.json").read_text())["tables"] for path in saves]
    assert tables_of[0] == tables_of[1] == tables_of[2]
    names = {Path(name).name.partition("-")[0] for name in files[0] if name.endswith(".arrow")}
    assert names == {"block", "rows"}


def test_sizes(tmp_path: Path) -> None:
    """A row has the bytes that its widths imply, and a file its frame."""
    path = saved(tmp_path, 3, plain_plan(SPECS, 1, "table_wise"), numbers(5), 4, None, {})
    for file in read_manifest(path)["tables"]["half"]["blocks"]:
        assert file["codes"] == {"row": "int4", "exp_avg": "bf16"}
        assert 0 <= file["num_bytes"] - file["num_rows"] * (4 + (24 // 2 + 4) + 24 * 2 + 4) < 4096
    summary = summarize(path)
    assert summary.longest_chain == 1
    quantised = read_manifest(path)["quantised"]
    assert {t.name: t.row_error for t in summary.tables if t.row_error} == {n: of["row"] for n, of in quantised.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codes": {"row": "int5"}}, "its column 'row' cannot be encoded as int5"),
        ({"codes": {"row": "bf16"}}, "its column 'row' cannot be encoded as bf16"),
        ({"codes": {"sum": "int4"}, "error": {"sum": 0.0}}, "its column 'sum' cannot be encoded as int4"),
        ({"error": {}}, "its codes and their errors must have the same columns"),
        ({"error": {"row": -1.0}}, "greater than or equal to 0"),
        ({"error": {"row": 1e9}}, "'quantised' must have the largest error"),
        ({"codes": {"row": "int2"}}, "must have the columns .id uint32, row fixed_size_list<item: uint8 not null>.9."),
    ],
)  # fmt: skip
def test_what_a_manifest_says_of_codes_is_checked(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = saved(tmp_path, 3, plain_plan(SPECS, 1, "table_wise"), numbers(5), 4, None, {})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tables"]["brain"]["blocks"][0] |= change
    manifest["manifest_checksum"] = digest.hash_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match=words):
        verify(path)


@pytest.mark.parametrize("bits", ROW_BIT_WIDTHS)
def test_rows_keep_their_bits_wherever_they_lie(tmp_path: Path, bits: RowBits) -> None:
    """Rows that are restored into another tier and on other ranks are saved with the same bytes."""
    specs = [TableSpec(name="user", num_embeddings=203, embedding_dim=40)]
    generator = torch.Generator().manual_seed(1)
    values = {"row": torch.randn(203, 40, generator=generator), "sum": torch.rand(203, generator=generator)}
    options = SaveOptions(bits={"user": bits})
    folder = StorageOptions(dir=tmp_path, engine="threads")
    files = []
    path = tmp_path
    for step, (tier, num_ranks) in enumerate([("hbm", 1), ("disk", 1), ("hbm", 4), ("cached", 2), ("disk", 2)]):
        near = {} if tier == "hbm" else {"tier": tier, "cache_rows": 16}
        plan = Plan.from_dict({"tables": {"*": {"sharding": "row_wise", **near}}}, specs, num_ranks)

        def run(world: World, plan: Plan = plan, step: int = step, path: Path = path) -> Path:
            placed = [(specs[0], shard) for shard in plan["user"].shards if world.rank in shard.ranks]
            shards = make_storages(placed, seed=0, device="cpu", options=folder)
            if step:
                load(path, world=world, shards=shards)
            else:
                shards[0].write(0, {name: value.numpy() for name, value in values.items()})
            fixed = {"step": step, "plan": plan, "dense": {}, "state": {}, "options": options}
            return save(tmp_path / "saved", world=world, shards=shards, **fixed)

        path = returned(on_ranks(num_ranks, run))[0]
        files.append({name: content for name, content in many_files(path).items() if name.endswith(".arrow")})
    assert len(files[0]) > 1
    assert all(later == files[0] for later in files)
