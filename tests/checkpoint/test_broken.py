"""Tests of damaged checkpoints: each fault is one clear error on every rank, and no wrong row is loaded."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from checkpoint.simulated import (
    assert_holds,
    blank,
    flip_middle,
    on_ranks,
    pieces,
    plain_plan,
    random_tables,
    returned,
    some_specs,
)
from meseta.checkpoint import SaveOptions, load, save, saving, verify
from meseta.checkpoint.files import digest, layout
from meseta.comm import World
from meseta.spec import MesetaError, OptimizerSpec, Plan, TableSpec

SPECS = [
    TableSpec(name="user", num_embeddings=300, embedding_dim=16, optimizer=OptimizerSpec(name="rowwise_adagrad")),
    TableSpec(name="item", num_embeddings=50, embedding_dim=8, optimizer=OptimizerSpec(name="adam")),
]
PLAN = plain_plan(SPECS, 1, "table_wise")
TABLES = random_tables(SPECS, seed=0)
DENSE = {"weight": torch.arange(6.0).view(2, 3)}
BLOCK = "tables/user/block-00000.arrow"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_alone(tmp_path)


def save_alone(parent: Path, **other: Any) -> Path:
    arguments = {"step": 1, "plan": PLAN, "dense": DENSE, "state": {"random": "aa"}, **other}
    return save(parent, world=World.single(), shards=pieces(SPECS, PLAN, 0, TABLES), **arguments)


def refusals(path: Path, specs: list[TableSpec] = SPECS) -> list[str]:
    """Return the errors of `load` on one rank, and on each of two under another plan. All must raise MesetaError."""
    plans = [plain_plan(specs, 1, "table_wise"), plain_plan(specs, 2, "row_wise")]
    messages = []
    for plan in plans:
        for result in on_ranks(
            plan.num_ranks,
            lambda world, plan=plan: load(path, world=world, shards=blank(specs, plan, world.rank)),
        ):
            assert isinstance(result, MesetaError), result
            messages.append(str(result))
    return messages


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def spoil_name(file: Path) -> None:
    """Rename a column to bytes that are not UTF-8."""
    file.write_bytes(file.read_bytes().replace(b"sum", b"\xffum"))


def garbage(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "name", "says"),
    [
        (Path.unlink, BLOCK, "cannot be read (No such file or directory)"),
        (Path.unlink, "dense.safetensors", "cannot be read (No such file or directory)"),
        (Path.unlink, "manifest.json", "manifest.json: No such file or directory"),
        (truncate, BLOCK, "bytes, but has"),
        (truncate, "dense.safetensors", "bytes, but has"),
        (truncate, "manifest.json", "is not JSON"),
        (flip_middle, BLOCK, "must have the checksum"),
        (spoil_name, BLOCK, "is not a complete Arrow file"),
        (garbage, BLOCK, "is not a complete Arrow file"),
        (garbage, "dense.safetensors", "is not a whole safetensors file"),
        (garbage, "manifest.json", "is not JSON"),
    ],
)
def test_damaged_files(path: Path, harm: Callable[[Path], None], name: str, says: str) -> None:
    harm(path / name)
    with pytest.raises(MesetaError) as refusal:
        verify(path)
    for message in [*refusals(path), str(refusal.value)]:
        assert says in message
        assert name in message


def test_checksums_are_named_in_full(path: Path) -> None:
    flip_middle(path / BLOCK)
    expected = json.loads((path / "manifest.json").read_text())["tables"]["user"]["blocks"][0]["checksum"]
    with pa.memory_map(str(path / BLOCK)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
        actual = digest.hash_arrays([batch["row"].flatten().to_numpy(), batch["sum"].to_numpy()])
    for message in refusals(path):
        assert expected in message and actual in message


def test_every_flipped_byte_is_found_or_harmless(path: Path) -> None:
    """A changed byte raises MesetaError, or leaves every value as it was."""
    rng = random.Random(0)
    for name in (BLOCK, "dense.safetensors", "manifest.json"):
        whole = (path / name).read_bytes()
        ends = [*range(min(400, len(whole))), *range(max(0, len(whole) - 700), len(whole))]  # place of the metadata
        for position in rng.sample(ends, 25) + rng.sample(range(len(whole)), 8):
            content = bytearray(whole)
            content[position] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(content)
            shards = blank(SPECS, PLAN, 0)
            try:
                loaded = load(path, world=World.single(), shards=shards)
            except MesetaError:
                continue
            assert_holds(shards, TABLES)
            assert torch.equal(loaded.dense["weight"], DENSE["weight"])
        (path / name).write_bytes(whole)
    verify(path)


def rewrite(path: Path, change: Callable[[pa.RecordBatch], list[pa.RecordBatch]]) -> None:
    """Replace the first block of 'user' by other, well-formed Arrow, and correct its size in the manifest."""
    with pa.memory_map(str(path / BLOCK)) as file:
        batches = change(pa.ipc.open_file(file).get_batch(0))
        with pa.OSFile(str(path / "new"), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    (path / "new").rename(path / BLOCK)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tables"]["user"]["blocks"][0]["num_bytes"] = (path / BLOCK).stat().st_size
    sign(path, manifest)


def sign(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with correct checksums, so that only its statements about files are wrong."""
    for entry in manifest["tables"].values():
        entry["checksum"] = digest.hash_table(entry)
    manifest["checksum"] = digest.hash_model(manifest)
    manifest["manifest_checksum"] = digest.hash_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def with_column(batch: pa.RecordBatch, index: int, values: pa.Array) -> pa.RecordBatch:
    arrays = [*batch.columns[:index], values, *batch.columns[index + 1 :]]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def with_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    values = batch.column(2).to_pylist()
    schema = batch.schema.set(2, pa.field(batch.schema.names[2], pa.float32(), nullable=True))
    arrays = [*batch.columns[:2], pa.array([None, *values[1:]], pa.float32())]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: [b.slice(0, 120)], "but has 1 record batches, the first of 120 rows"),
        (lambda b: [b.slice(0, 100), b.slice(100)], "but has 2 record batches"),
        (lambda b: [with_column(b, 0, pa.array(np.arange(1, b.num_rows + 1)))], "but has other ids"),
        (lambda b: [b.drop_columns(["sum"])], "must have the columns [id int64"),
        (lambda b: [with_nulls(b)], "must have the columns"),
    ],
)
def test_other_arrow_files(path: Path, change: Callable[[pa.RecordBatch], list[pa.RecordBatch]], says: str) -> None:
    rewrite(path, change)
    assert all(says in message and BLOCK in message for message in refusals(path))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (
            ["format"],
            "meseta.checkpoint/3",
            "format must be 'meseta.checkpoint/1' or 'meseta.checkpoint/2', got 'meseta.checkpoint/3'",
        ),
        (["format"], "meseta.checkpoint/2", "'features': field required"),
        (["features"], ["carried"], "'features' is an unknown key"),
        (["format"], None, "got None; read the checkpoint with the version that wrote it"),
        (["tables", "user", "blocks", 0, "path"], "../../etc/passwd", f"must have the path '{BLOCK}', got '../../etc"),
        (["tables", "user", "blocks", 0, "path"], "/etc/passwd", f"must have the path '{BLOCK}', got '/etc/passwd'"),
        (["dense", "path"], "../x", "'dense.path': input should be 'dense.safetensors'"),
        (["tables", "user", "blocks", 0, "first_row"], 5, "block 0 must begin at row 0 and hold 128, got 5 and 128"),
        (["tables", "user", "blocks", 0, "num_rows"], 3, "block 0 must begin at row 0 and hold 128, got 0 and 3"),
        (["tables", "item", "num_embeddings"], 51, "block 0 must begin at row 0 and hold 51, got 0 and 50"),
        (["tables", "user", "columns"], 7, "is malformed"),
        (["tables", "user", "columns", 0, "dtype"], "float31", "is malformed"),
        (["tables", "user", "embedding_dim"], "16", "is malformed"),
        (["tables"], [], "is malformed"),
        (["plan", "tables"], {"user": {}}, "its tables and those of its plan differ in 'item'"),
        (["state", "random"], "x" * (1 << 21), "it has a string of more than 1,048,576 characters"),
    ],
)
def test_manifests_that_mislead(path: Path, keys: list[Any], value: Any, says: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    inner = manifest
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    try:
        sign(path, manifest)
    except (TypeError, AttributeError):
        manifest["manifest_checksum"] = digest.hash_manifest(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert all(says in message for message in refusals(path))


CARRIED = {"ids": torch.arange(5), "pooled": torch.rand(5, 24)}


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (
            ["features"],
            ["carried", "towers"],
            "feature 'towers' is not supported by this version, which supports 'carried'",
        ),
        (["features"], [7], "feature 7 is not supported by this version, which supports 'carried'"),
        (["features"], [], "'features': list should have at least 1 item"),
        (["features"], "carried", "'features': input should be a valid list"),
        (["carried"], None, "'carried': input should be"),
        (["carried", "path"], "../carried.safetensors", "'carried.path': input should be 'carried.safetensors'"),
        (["carried", "path"], "dense.safetensors", "'carried.path': input should be 'carried.safetensors'"),
        (["carried", "num_bytes"], 7, "carried.safetensors' must have 7 bytes"),
        (["carried", "checksum"], "0" * 64, "carried.safetensors' must have the checksum 0000"),
        (["format"], "meseta.checkpoint/1", "is an unknown key"),
    ],
)
def test_answers_that_mislead(tmp_path: Path, keys: list[Any], value: Any, says: str) -> None:
    path = save_alone(tmp_path, options=SaveOptions(prefetched_embeddings=CARRIED))
    manifest = json.loads((path / "manifest.json").read_text())
    inner = manifest
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    sign(path, manifest)
    assert all(says in message for message in refusals(path))


@pytest.mark.parametrize("key", ["step", "state", "reader", "plan", "checksum", "tables"])
def test_a_changed_manifest_is_found(path: Path, key: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    if key == "tables":
        manifest["tables"]["user"]["blocks"][0]["checksum"] = "0" * 64
    else:
        manifest[key] = 7
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert all("was changed: manifest_checksum must be" in message for message in refusals(path))


def but(index: int, **changes: Any) -> list[TableSpec]:
    old = SPECS[index]
    fields = {name: getattr(old, name) for name in ("name", "num_embeddings", "embedding_dim", "dtype", "optimizer")}
    return [TableSpec(**{**fields, **changes}) if i == index else spec for i, spec in enumerate(SPECS)]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (but(0, num_embeddings=301), "table 'user' has num_embeddings 300 there, but 301 in the model; set it to 300"),
        (but(1, embedding_dim=24), "table 'item' has embedding_dim 8 there, but 24 in the model"),
        (but(0, dtype="float64"), "table 'user' has dtype float32 there, but float64 in the model"),
        (
            but(1, optimizer=OptimizerSpec(name="sgd")),
            "was trained with row optimizer 'adam' (state: exp_avg float32 per element, exp_avg_sq float32 per "
            "element), but the model uses row optimizer 'sgd' (state: none)",
        ),
        (but(0, name="users"), "table 'user' is missing in the model, which has item, users"),
        (SPECS[:1], "table 'item' is missing in the model"),
        ([*SPECS, TableSpec(name="z", num_embeddings=2, embedding_dim=2)], "table 'z' is missing in the checkpoint"),
    ],
)
def test_models_that_differ(path: Path, specs: list[TableSpec], says: str) -> None:
    for message in refusals(path, specs):
        assert says in message
        assert str(path) in message and "start without this checkpoint" in message


def test_the_directory_above_names_the_checkpoint_in_it(path: Path) -> None:
    assert all(f"choose one of them, such as {str(path)!r}" in message for message in refusals(path.parent))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert all("No such file or directory" in message for message in refusals(tmp_path / "nowhere"))


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.zeros(2), {"a": float("inf")}])
def test_state_that_is_no_json(tmp_path: Path, value: Any) -> None:
    with pytest.raises(MesetaError, match="state 'loss' cannot be written as JSON"):
        save_alone(tmp_path, state={"loss": value})
    assert not list(tmp_path.iterdir())


def test_plan_and_shards_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="the plan is for 2 ranks, but 1 are saving"):
        save_alone(tmp_path, plan=plain_plan(SPECS, 2, "row_wise"))
    with pytest.raises(MesetaError, match=r"table 'item'.*was not given"):
        save(
            tmp_path,
            world=World.single(),
            step=1,
            plan=PLAN,
            shards=pieces(SPECS, PLAN, 0, TABLES)[:1],
            dense={},
            state={},
        )
    other = Plan.from_dict({"tables": {"*": "row_wise"}}, SPECS[:1], 1)
    with pytest.raises(MesetaError, match="is not in the plan"):
        save(
            tmp_path,
            world=World.single(),
            step=1,
            plan=other,
            shards=pieces(SPECS, PLAN, 0, TABLES),
            dense={},
            state={},
        )
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_write_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block meets a full disk. All ranks raise and name the file, and the directory is unchanged."""
    specs = some_specs()
    plan = plain_plan(specs, 3, "row_wise")
    tables = random_tables(specs, seed=1)

    def run(world: World) -> Path:
        return save(
            tmp_path, world=world, step=2, plan=plan, shards=pieces(specs, plan, world.rank, tables), dense={}, state={}
        )

    real = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("tables/user/block-00003.arrow"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for result in on_ranks(3, run):
        assert isinstance(result, MesetaError), result
        assert "tables/user/block-00003.arrow' cannot be written: No space left on device" in str(result)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    verify(returned(on_ranks(3, run))[0])


@pytest.mark.parametrize("limit_bytes", [0, 1000, 10_000])
def test_full_disk_in_the_middle_of_a_file(tmp_path: Path, limit_bytes: int) -> None:
    """The system's refusal to write becomes one error, and the older checkpoint stays."""
    old = save_alone(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        with pytest.raises(MesetaError, match="cannot be written"):
            save_alone(tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [old]
    verify(old)


@pytest.mark.parametrize("size", [1, 2])
def test_too_little_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def short(*_: object) -> None:
        raise MemoryError("no room for a block")

    monkeypatch.setattr(saving, "write_block", short)
    plan = plain_plan(SPECS, size, "row_wise")

    def run(world: World) -> Path:
        shards = pieces(SPECS, plan, world.rank, TABLES)
        return save(tmp_path, world=world, step=2, plan=plan, shards=shards, dense={}, state={})

    assert all("no room for a block" in str(result) for result in on_ranks(size, run))
    assert not list(tmp_path.iterdir())


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(MesetaError, match="File exists"):
        save_alone(tmp_path / "taken")


def test_ranks_that_do_not_share_the_directory(tmp_path: Path) -> None:
    plan = plain_plan(SPECS, 2, "row_wise")
    results = on_ranks(
        2,
        lambda world: save(
            tmp_path / str(world.rank),
            world=world,
            step=1,
            plan=plan,
            shards=pieces(SPECS, plan, world.rank, TABLES),
            dense={},
            state={},
        ),
    )
    assert all("choose a folder that all hosts share" in str(result) for result in results)


def test_a_copy_is_a_checkpoint(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "anywhere")
    assert verify(tmp_path / "anywhere") == verify(path)
