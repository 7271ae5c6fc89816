"""One whole checkpoint of a chain, block by block: a table never has to fit memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import file_of, writing
from meseta.checkpoint.files.block import sync_block, write_block
from meseta.checkpoint.files.chain import Entry, blocks_of, read_chain
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.paths import block_path, table_folder
from meseta.checkpoint.files.tensors import read_tensors
from meseta.checkpoint.manifest import CARRIED, made_whole, read_manifest, write_manifest
from meseta.checkpoint.store.directory import begin, checkpoint_path, commit, discard, sole_writer, temporary_path
from meseta.machine.files import sync
from meseta.spec import MesetaError
from meseta.spec.blocks import WRITES_IN_FLIGHT


def compact(path: Path | str, out: Path | str, *, on_rows: Callable[[int], object] = lambda num_rows: None) -> Path:
    """Write the checkpoint at `path`, a delta or not, as a whole one to `out/step-...`, and return where it is. It has
    the bytes that the run would have written there without deltas. `on_rows` is told of rows as they are written.

    Raises MesetaError where there is one of that step already, where a file of `path` is damaged, and on a full disk;
    then nothing stays.
    """
    path, out = Path(path), Path(out)
    manifest = read_manifest(path)
    step = manifest["step"]
    if checkpoint_path(out, step).exists():
        raise MesetaError(f"checkpoint {str(checkpoint_path(out, step))!r} exists; give another folder")
    temporary = temporary_path(out, step)
    try:
        with sole_writer(out):
            try:
                return _write(path, manifest, temporary, on_rows)
            finally:
                with suppress(OSError):
                    discard(temporary)
    except OSError as error:
        raise MesetaError(f"checkpoint {str(out)!r}: {error.strerror or error}; make room there") from None


def _write(path: Path, manifest: dict[str, Any], temporary: Path, on_rows: Callable[[int], object]) -> Path:
    """All files of the whole one, and the commit."""
    begin(temporary.parent, manifest["step"], [table_folder(name) for name in manifest["tables"]])
    tables = {name: _write_table(path, temporary, name, t, on_rows) for name, t in manifest["tables"].items()}
    for key in ("dense", CARRIED):
        if key in manifest:
            read_tensors(path, manifest[key])
            with writing(temporary / manifest[key]["path"]):
                shutil.copyfile(file_of(path, manifest[key]), temporary / manifest[key]["path"])
                sync(temporary / manifest[key]["path"])
    write_manifest(temporary, made_whole(manifest, tables))
    return commit(temporary)


def _write_table(
    path: Path, temporary: Path, name: str, table: dict[str, Any], on_rows: Callable[[int], object]
) -> dict[str, Any]:
    """Its blocks, each in one file; its entry in the manifest of a whole checkpoint."""
    schema = BlockSchema.from_dict(table)

    def write(files: list[Entry]) -> dict[str, Any]:
        first = files[0]["first_row"]
        values = read_chain(path, schema, files, keep=True)
        entry = write_block(temporary, block_path(name, first // table["block_rows"]), schema, first, values)
        on_rows(entry["num_rows"])
        return entry

    with ThreadPoolExecutor(WRITES_IN_FLIGHT) as pool:
        blocks = list(pool.map(write, blocks_of(table)))
        list(pool.map(partial(sync_block, temporary), [entry["path"] for entry in blocks]))
    return {**table, "blocks": blocks}
