"""Tests of listing, comparing and exporting checkpoints, against the saved tables and readers of other programs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoint.simulated import Tables, bits, pieces, plain_plan, random_tables, some_specs
from meseta.checkpoint import (
    Mirror,
    SaveOptions,
    compare,
    export,
    fetch,
    find_checkpoint,
    list_checkpoints,
    prune,
    save,
    summarize,
    verify,
)
from meseta.checkpoint.files import layout
from meseta.comm import World
from meseta.spec import MesetaError
from meseta.system.files import to_file_name

SPECS = some_specs()
TABLES = random_tables(SPECS, seed=3)
DENSE = {"over.weight": torch.arange(6.0).view(2, 3), "over.bias": torch.zeros(3, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)


def write(
    parent: Path,
    step: int,
    tables: Tables = TABLES,
    dense: dict[str, torch.Tensor] = DENSE,
    specs: list = SPECS,
    carried: dict[str, torch.Tensor] | None = None,
) -> Path:
    plan = plain_plan(specs, 1, "table_wise")
    shards = pieces(specs, plan, 0, tables)
    saved = {"dense": dense, "options": SaveOptions(prefetched_embeddings=carried), "state": {"reader": {"row": step}}}
    return save(parent, world=World.single(), step=step, plan=plan, shards=shards, **saved)


def changed(name: str, column: str, rows: list[int]) -> Tables:
    """Return TABLES with one flipped bit in the first number of some rows."""
    tables = {table: {key: value.clone() for key, value in columns.items()} for table, columns in TABLES.items()}
    flat = tables[name][column].view(len(tables[name][column]), -1)
    flat.view(torch.uint8)[rows, 0] ^= 1
    return tables


def test_list_has_all_by_step_and_says_what_is_damaged(tmp_path: Path) -> None:
    for step in (30, 4, 200):
        write(tmp_path / "checkpoints", step)
    broken = tmp_path / "checkpoints" / "step-000000030" / "dense.safetensors"
    broken.write_bytes(b"")
    (tmp_path / "checkpoints" / ".tmp-step-000000300").mkdir()
    listed = list_checkpoints(tmp_path)
    assert [c.path.name for c in listed] == ["step-000000004", "step-000000030", "step-000000200"]
    assert [c.summary.step if c.summary else None for c in listed] == [4, None, 200]
    assert str(broken) in listed[1].problem and "must have" in listed[1].problem
    assert find_checkpoint(tmp_path).name == "step-000000200"
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000200")
    assert find_checkpoint(tmp_path / "checkpoints").name == "step-000000030"  # damage is reported


def test_a_summary_says_what_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    summary = summarize(path)
    assert (summary.step, summary.num_ranks, summary.reader) == (7, 1, {"row": 7})
    assert summary.checksum == verify(path)
    assert {t.name: (t.num_embeddings, t.embedding_dim, t.dtype, t.optimizer) for t in summary.tables} == {
        s.name: (s.num_embeddings, s.embedding_dim, s.dtype, s.optimizer.name) for s in SPECS
    }
    assert {t.name: set(t.states) for t in summary.tables} == {n: set(c) - {"row"} for n, c in TABLES.items()}
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert summary.num_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_place_without_checkpoints_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(MesetaError, match=r"is not a folder|holds no checkpoint"):
        find_checkpoint(tmp_path / place)


def test_equal_models_of_other_steps_do_not_differ(tmp_path: Path) -> None:
    assert not list(compare(write(tmp_path, 1), write(tmp_path, 2)))


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_that_differ_are_counted(tmp_path: Path, name: str) -> None:
    one = write(tmp_path / "a", 1)
    for column, values in TABLES[name].items():
        rows = sorted({len(values) - 1, len(values) // 3})
        other = write(tmp_path / column, 1, changed(name, column, rows))
        [difference] = compare(one, other)
        what = "rows" if column == "row" else f"state {column!r}"
        assert difference.name == f"table {name!r}"
        assert difference.description.startswith(
            f"{what}: {len(rows):,} of {len(values):,} differ, the first is row {rows[0]:,}; the largest difference is "
        )


def test_the_size_of_a_difference(tmp_path: Path) -> None:
    spec = next(s for s in SPECS if s.dtype == "float32")
    tables = {
        name: {key: torch.zeros_like(value) for key, value in columns.items()} for name, columns in TABLES.items()
    }
    other = {name: {key: value.clone() for key, value in columns.items()} for name, columns in tables.items()}
    other[spec.name]["row"][0, 0], other[spec.name]["row"][1, 0] = 0.25, -0.75
    dense = {**DENSE, "over.weight": DENSE["over.weight"] + torch.tensor([0.0, 0.5, 0.0])}
    table, tensor = compare(write(tmp_path / "a", 1, tables), write(tmp_path / "b", 1, other, dense))
    assert table.description.endswith(" the largest difference is 0.75")
    assert (tensor.name, tensor.description) == (
        "dense tensor 'over.weight'",
        "2 of 6 elements differ; the largest difference is 0.5",
    )


@pytest.mark.parametrize("num_rows", [1, 96, 97, 150, 300])
def test_common_rows_of_tables_of_different_sizes(tmp_path: Path, num_rows: int) -> None:
    """Tables grow between days. Several sizes are those of blocks of the larger table."""
    [spec] = [spec for spec in SPECS if spec.name == "user"]
    other = {column: value[:num_rows].clone() for column, value in TABLES["user"].items()}
    if num_rows > 203:
        other = {column: torch.cat([value, value])[:num_rows] for column, value in TABLES["user"].items()}
    last = min(num_rows, 203) - 1
    other["row"].view(torch.uint8)[last, 0] ^= 1
    smaller = [replace(spec, num_embeddings=num_rows)]
    one = write(tmp_path / "a", 1, specs=[spec])
    size, rows = compare(one, write(tmp_path / "b", 1, {"user": other}, specs=smaller))
    assert size.description == f"num_embeddings: 203, and {num_rows}"
    assert rows.description.startswith(f"rows: 1 of {last + 1:,} differ, the first is row {last:,}; ")


def test_other_tables_and_tensors_are_named(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1, specs=SPECS[1:], dense={"old": torch.zeros(1), "both": torch.zeros(2)})
    other = write(tmp_path / "b", 1, specs=SPECS[:-1], dense={"both": torch.zeros(3)})
    differences = {d.name: d.description for d in compare(one, other)}
    assert differences[f"table {SPECS[0].name!r}"] == f"is only in {str(other)!r}"
    assert differences[f"table {SPECS[-1].name!r}"] == f"is only in {str(one)!r}"
    assert differences["dense tensor 'old'"] == f"is only in {str(one)!r}"
    assert differences["dense tensor 'both'"] == "is float32 [2], and float32 [3]"


def test_answers_that_are_carried_are_known_to_all_tools(tmp_path: Path) -> None:
    """The checkpoint without them has the same checksum and, byte for byte, the same other files."""
    carried = {"ids": torch.arange(3), "pooled": torch.rand(3, 40)}
    plain, one = write(tmp_path / "plain", 1), write(tmp_path / "one", 1, carried=carried)
    other = write(tmp_path / "other", 1, carried={**carried, "pooled": carried["pooled"] + 1})
    assert verify(plain) == verify(one) == verify(other)
    assert {p.name for p in one.iterdir()} - {p.name for p in plain.iterdir()} == {"carried.safetensors"}
    assert (one / "dense.safetensors").read_bytes() == (plain / "dense.safetensors").read_bytes()
    size = (one / "carried.safetensors").stat().st_size
    assert summarize(one).carried_bytes == size == summarize(one).num_bytes - summarize(plain).num_bytes
    assert [d.name for d in compare(one, other)] == ["carried tensor 'pooled'"]
    assert [(d.name, d.description) for d in compare(plain, one)] == [
        (f"carried tensor {name!r}", f"is only in {str(one)!r}") for name in ("ids", "pooled")
    ]
    export(one, tmp_path / "exported", "safetensors")
    assert not [*(tmp_path / "exported").rglob("carried*")]  # served rows have no deferred update
    Mirror(f"file://{tmp_path}/there").put(one)
    fetched = fetch(f"file://{tmp_path}/there/{one.name}", tmp_path / "back")
    assert (fetched / "carried.safetensors").read_bytes() == (one / "carried.safetensors").read_bytes()
    (fetched / "carried.safetensors").write_bytes(bytes(size))
    with pytest.raises(MesetaError, match=r"carried.safetensors' is not a whole safetensors file"):
        verify(fetched)
    (fetched / "carried.safetensors").unlink()
    assert [listed.summary for listed in list_checkpoints(tmp_path / "back")] == [None]
    older = write(tmp_path / "back", 0)
    prune(tmp_path / "back", 1)
    assert older.exists()  # the newest complete one


def test_every_bit_through_safetensors(tmp_path: Path) -> None:
    rows = []
    export(write(tmp_path, 1), tmp_path / "out", "safetensors", states=True, on_rows=rows.append)
    assert sum(rows) == sum(spec.num_embeddings for spec in SPECS)
    for name, columns in TABLES.items():
        got = load_file(tmp_path / "out" / "tables" / f"{to_file_name(name)}.safetensors")
        assert set(got) == set(columns)
        for key, value in columns.items():
            assert got[key].dtype == value.dtype and torch.equal(bits(got[key]), bits(value))
    dense = load_file(tmp_path / "out" / "dense.safetensors")
    assert {key: value.tolist() for key, value in dense.items()} == {k: v.tolist() for k, v in DENSE.items()}


def test_numpy_reads_what_was_exported(tmp_path: Path) -> None:
    export(write(tmp_path, 1), tmp_path / "out", "numpy", states=True)
    for name, columns in TABLES.items():
        for key, value in columns.items():
            got = np.load(tmp_path / "out" / "tables" / to_file_name(name) / f"{key}.npy")
            want = value.float() if value.dtype == torch.bfloat16 else value
            np.testing.assert_array_equal(got.view(np.uint8), want.numpy().view(np.uint8))
    with np.load(tmp_path / "out" / "dense.npz") as dense:
        assert {key: dense[key].tolist() for key in dense} == {k: v.tolist() for k, v in DENSE.items()}


def test_only_the_tables_asked_for_and_no_states(tmp_path: Path) -> None:
    name = SPECS[0].name
    files = export(write(tmp_path, 1), tmp_path / "out", "numpy", tables=[name])
    assert [str(file.relative_to(tmp_path / "out")) for file in files] == [
        "dense.npz",
        "export.json",
        f"tables/{to_file_name(name)}/row.npy",
    ]


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (tmp_path / "there").mkdir()
    with pytest.raises(MesetaError, match="exists already; choose a new folder"):
        export(path, tmp_path / "there", "numpy")
    with pytest.raises(MesetaError, match=r"no table of checkpoint .* matches 'nope'"):
        export(path, tmp_path / "out", "numpy", tables=["nope"])
    manifest = json.loads((path / "manifest.json").read_text())
    block = path / manifest["tables"][SPECS[0].name]["blocks"][0]["path"]
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 255
    block.write_bytes(content)
    with pytest.raises(MesetaError, match="checkpoint file"):
        export(path, tmp_path / "out", "safetensors")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "there"]
