"""Tests of crafted deltas that need files of older checkpoints: every command refuses them in one line. It opens only
files of the checkpoint folder.

Each has one fault, and all checksums are right.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bad_input.commands import run_here, tree, within
from meseta.checkpoint import verify
from meseta.checkpoint.files import digest, layout
from sampling import sample
from small_run import settings, train, write_config

FIRST, SECOND, NEWEST = "step-000000002", "step-000000004", "step-000000006"
BLOCK, ROWS = "tables/user/block-00000.arrow", "tables/user/rows-00000.arrow"
Manifest = dict[str, Any]
Change = Callable[[Manifest], object]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 2048)


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of step 2, and deltas of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("chains")
    changes = {"train__max_steps": 6, "checkpoint__every_steps": 2, "checkpoint__deltas": "consecutive"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", 2048)
        train(settings(tiny, folder / "run", **changes, checkpoint__keep_last=9))
    return folder / "run"


def sign(path: Path, manifest: Manifest) -> None:
    """Write a manifest with correct checksums."""
    for entry in manifest["tables"].values():
        for key, made in (("checksum", digest.hash_table), ("chain", digest.hash_chain)):
            if key in entry:
                entry[key] = made(entry)
    for key in {"checksum", "chain"} & manifest.keys():
        with suppress(KeyError):
            manifest[key] = digest.hash_model(manifest)
    manifest["manifest_checksum"] = digest.hash_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def files(manifest: Manifest, table: str = "user") -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = manifest["tables"][table]["blocks"]
    return blocks


def chain(change: Callable[[list[dict[str, Any]]], object]) -> Change:
    """Change the three files of the first block of a table."""

    def spoil(manifest: Manifest) -> None:
        blocks = files(manifest)
        first = [file for file in blocks if file["first_row"] == 0]
        assert [file["path"] for file in first] == [f"../{FIRST}/{BLOCK}", f"../{SECOND}/{ROWS}", ROWS]
        rest = blocks[3:]
        change(first)
        manifest["tables"]["user"]["blocks"] = [*first, *rest]

    return spoil


def at(number: int, **values: Any) -> Change:
    return chain(lambda files: files[number].update(values))


def swapped(one: int, other: int) -> Change:
    def swap(files: list[dict[str, Any]]) -> None:
        files[one], files[other] = files[other], files[one]

    return chain(swap)


def put(*keys: Any, value: Any) -> Change:
    def change(manifest: Manifest) -> None:
        inner: Any = manifest
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


NEEDS = "which must be a file of an older checkpoint, in ascending order of steps"
WHOLE = "must begin at row 0 and hold"
MANIFESTS: dict[str, tuple[Change, str]] = {
    "newer before older": (swapped(1, 2), NEEDS),
    "rows before the block": (swapped(0, 1), WHOLE),
    "reversed": (chain(list.reverse), WHOLE),
    "no first file": (chain(lambda files: files.pop(0)), WHOLE),
    "rows alone": (chain(lambda files: (files.pop(0), files.pop(0))), WHOLE),
    "its own file twice": (
        chain(lambda files: files.append(dict(files[-1]))),
        "block 0 has two files in this checkpoint",
    ),
    "an older file twice": (chain(lambda files: files.insert(1, dict(files[1]))), NEEDS),
    "the block twice": (chain(lambda files: files.insert(1, dict(files[0]))), WHOLE),
    "of its step": (at(1, path=f"../{NEWEST}/{ROWS}"), NEEDS),
    "of a later step": (at(1, path=f"../step-000000008/{ROWS}"), NEEDS),
    "of a step before the whole one": (at(0, path=f"../step-000000001/{BLOCK}"), NEEDS),
    "of a former one": (at(1, path=f"../.old-{SECOND}/{ROWS}"), NEEDS),
    "of one in progress": (at(1, path=f"../.tmp-{SECOND}/{ROWS}"), NEEDS),
    "of a foreign folder": (at(1, path=f"../elsewhere/{ROWS}"), NEEDS),
    "of a folder in it": (at(1, path=f"../{SECOND}/../elsewhere/{ROWS}"), "must have the path"),
    "two folders up": (at(1, path=f"../../elsewhere/{ROWS}"), "must have the path"),
    "up and up again": (at(1, path=f"../../../etc/{ROWS}"), "must have the path"),
    "another's folder": (at(1, path="../../../etc/passwd"), "must have the path"),
    "absolute": (at(1, path=f"/{ROWS}"), "must have the path"),
    "a sibling in itself": (at(1, path=f"./../{SECOND}/{ROWS}"), "must have the path"),
    "twice a slash": (at(1, path=f"..//{SECOND}/{ROWS}"), "must have the path"),
    "a step of few digits": (at(1, path=f"../step-4/{ROWS}"), NEEDS),
    "a step of other digits": (at(1, path=f"../step-00000000٤/{ROWS}"), NEEDS),
    "a step without end": (at(1, path=f"../step-{'9' * 4000}/{ROWS}"), NEEDS),
    "a folder without a name": (at(1, path=f"..//{ROWS}"), NEEDS),
    "rows of another table": (at(1, path=f"../{SECOND}/{ROWS.replace('user', 'item')}"), "must have the path"),
    "rows of another block": (at(1, path=f"../{SECOND}/{ROWS.replace('00000', '00001')}"), "must have the path"),
    "the block as rows": (at(0, path=f"../{FIRST}/{ROWS}"), "must have the path"),
    "rows as the block": (at(1, path=f"../{SECOND}/{BLOCK}"), "must have the path"),
    "too few bytes": (at(1, num_bytes=9), "block 0 must have"),
    "too many bytes": (at(1, num_bytes=1 << 40), "block 0 must have"),
    "as many rows as the block": (chain(lambda files: files[1].update(num_rows=files[0]["num_rows"])), WHOLE),
    "more rows than the block": (at(1, num_rows=1 << 40), WHOLE),
    "no rows": (at(1, num_rows=0), "num_rows"),
    "another first row": (at(1, first_row=1), "must be in"),
    "rows of no number": (at(1, num_rows="3"), "num_rows"),
    "a path of no text": (at(1, path=7), "path"),
    "more keys": (at(1, more={}), "is an unknown key"),
    "codes of no column": (at(1, codes={}), "must have the same columns"),
    "no deltas": (lambda manifest: manifest.pop("deltas"), "'features'"),
    "deltas of nothing": (put("deltas", value=None), "deltas"),
    "deltas that it lacks": (put("features", value=["carried"]), "'features'"),
    "deltas twice": (put("features", value=["deltas", "deltas"]), "'features'"),
    "features that it lacks": (put("features", value=["carried", "deltas"]), "'features'"),
    "a feature of tomorrow": (
        put("features", value=["deltas", "folded"]),
        "feature 'folded' is not supported by this version",
    ),
    "of the first format": (put("format", value="meseta.checkpoint/1"), "is an unknown key"),
    "another policy": (put("deltas", "policy", value="whole"), "policy"),
    "no sizes": (put("deltas", "delta_bytes", value=[]), "delta_bytes"),
    "sizes below nothing": (put("deltas", "delta_bytes", value=[-1]), "delta_bytes"),
    "many sizes": (put("deltas", "delta_bytes", value=[0] * 70_000), "delta_bytes"),
    "whole after it": (put("deltas", "whole_step", value=8), "must be less than step 6"),
    "whole itself": (put("deltas", "whole_step", value=6), "must be less than step 6"),
    "whole after its files": (put("deltas", "whole_step", value=3), NEEDS),
    "a key beside": (put("deltas", "more", value=1), "'deltas.more'"),
    "a checksum too": (put("tables", "user", "checksum", value="0" * 64), "must have 'chain' instead of 'checksum'"),
    "a checksum instead": (
        lambda manifest: manifest["tables"]["user"].update(checksum=manifest["tables"]["user"].pop("chain")),
        "must have 'chain' instead of 'checksum'",
    ),
    "no digest": (lambda manifest: manifest["tables"]["user"].pop("chain"), "was changed"),
    "a model's checksum": (
        lambda manifest: manifest.update(checksum=manifest.pop("chain")),
        "the model must have 'chain' instead of 'checksum'",
    ),
    "of another step": (put("step", value=7), "its step is 7"),
}
"""Function that makes the manifest of step 6, and the expected error, by fault."""


def rewritten(change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Callable[[Path], None]:
    """Write other rows into the file of step 4, and a manifest of step 6 with their size and digest."""

    def spoil(folder: Path) -> None:
        file = folder / SECOND / ROWS
        batch = change(pa.ipc.open_file(pa.BufferReader(file.read_bytes())).get_batch(0))
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        columns = [c.flatten() if pa.types.is_fixed_size_list(c.type) else c for c in batch.columns]
        manifest = json.loads((folder / NEWEST / "manifest.json").read_text())
        [entry] = [entry for entry in files(manifest) if entry["path"] == f"../{SECOND}/{ROWS}"]
        checksum = digest.hash_arrays([column.to_numpy() for column in columns])
        entry.update(num_bytes=file.stat().st_size, num_rows=batch.num_rows, checksum=checksum)
        sign(folder / NEWEST, manifest)

    return spoil


def with_ids(change: Callable[[np.ndarray], np.ndarray], kind: str = "uint32") -> Callable[[Path], None]:
    def other(batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = pa.array(change(batch["id"].to_numpy().copy()).astype(kind))
        fields = batch.schema.set(0, pa.field("id", ids.type, nullable=False))
        return pa.RecordBatch.from_arrays([ids, *batch.columns[1:]], schema=fields)

    return rewritten(other)


def linked(name: str, target: str) -> Callable[[Path], None]:
    """Replace a file or folder by a link."""

    def spoil(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent / "former")
        path.symlink_to(target.format(folder=folder))

    return spoil


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "ids that fall": (with_ids(lambda ids: ids[::-1]), "must have ascending ids below"),
    "an id twice": (with_ids(lambda ids: np.repeat(ids[:1], len(ids))), "must have ascending ids below"),
    "an id outside": (with_ids(lambda ids: ids + 16), "must have ascending ids below"),
    "ids of the table": (with_ids(lambda ids: ids, "int64"), "must have the columns"),
    "ids with a sign": (with_ids(lambda ids: ids, "int32"), "must have the columns"),
    "no state": (rewritten(lambda batch: batch.drop_columns(["sum"])), "must have"),
    "columns turned round": (rewritten(lambda batch: batch.select([0, 2, 1])), "must have the columns"),
    "a block": (lambda folder: shutil.copy(folder / FIRST / BLOCK, folder / SECOND / ROWS), f"{SECOND}/{ROWS}"),
    "a link outside": (linked(f"{SECOND}/{ROWS}", "{folder}/../secret"), f"{SECOND}/{ROWS}"),
    "a folder that is a link outside": (linked(f"{SECOND}/tables", "{folder}/../secrets"), f"{SECOND}/tables"),
    "a FIFO": (lambda folder: ((folder / SECOND / ROWS).unlink(), os.mkfifo(folder / SECOND / ROWS)), "it is a FIFO"),  # type: ignore[dict-item]
    "a folder that is none": (lambda folder: shutil.rmtree(folder / SECOND), "No such file or directory"),
}
"""Function that damages a file of step 4 that step 6 needs, by fault."""


class Opened:
    """Records the paths that this process opens."""

    paths: list[str] | None = None

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.paths.append(os.path.realpath(arguments[0]))

    @contextmanager
    def kept(self) -> Iterator[list[str]]:
        self.paths = paths = []
        try:
            yield paths
        finally:
            self.paths = None


OPENED = Opened()
sys.addaudithook(OPENED.hook)


def refuse(tiny: Path, trained: Path, tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    """Check that each command refuses the checkpoint and changes no file."""
    run, out = Path(shutil.copytree(trained, tmp_path / "run")), tmp_path / "out"
    folder = run / "checkpoints"
    for name in (f"elsewhere/{ROWS}", f"checkpoints/elsewhere/{ROWS}", "secret", "secrets/user/rows-00000.arrow"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / SECOND / ROWS, run / name)
    spoil(folder)
    newest, config = folder / NEWEST, settings(tiny, run, checkpoint__deltas="consecutive", train__max_steps=8)
    commands: list[list[object]] = [
        ["checkpoint", "verify", newest],
        ["checkpoint", "diff", folder / FIRST, newest],
        ["checkpoint", "export", newest, "--out", out],
        ["checkpoint", "compact", newest, "--out", out],
        ["train", write_config(tmp_path / "c.yaml", config)],
    ]
    before = tree(run)
    for command in commands:
        with OPENED.kept() as opened, within(60, str(command)):
            ended = run_here(*command)
        assert ended.code == 1 and len(ended.errors) == 1 and "Traceback" not in ended.err, (command, ended)
        assert says in ended.errors[0] and ended.errors[0].isprintable() and len(ended.errors[0]) < 1500, ended
        foreign = [path for path in opened if "elsewhere" in path or "secret" in path or path.startswith("/etc/p")]
        assert not foreign, (command, foreign)
        shutil.rmtree(out, ignore_errors=True)
        assert tree(run) == before, command


@pytest.mark.parametrize("name", sample(MANIFESTS, k=5, seed=0))
def test_manifests(tiny: Path, trained: Path, tmp_path: Path, name: str) -> None:
    change, says = MANIFESTS[name]

    def spoil(folder: Path) -> None:
        manifest = json.loads((folder / NEWEST / "manifest.json").read_text())
        change(manifest)
        sign(folder / NEWEST, manifest)

    refuse(tiny, trained, tmp_path, spoil, says)


@pytest.mark.parametrize("name", sample(FILES, k=3, seed=0))
def test_files(tiny: Path, trained: Path, tmp_path: Path, name: str) -> None:
    refuse(tiny, trained, tmp_path, *FILES[name])


def test_as_it_was_it_is_whole(trained: Path) -> None:
    """The checkpoints of the other tests, and their checksums, are valid before a fault is made."""
    path = trained / "checkpoints" / NEWEST
    before = (path / "manifest.json").read_text()
    sign(path, json.loads(before))
    assert json.loads(before) == json.loads((path / "manifest.json").read_text())
    verify(path)
