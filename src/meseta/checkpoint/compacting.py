"""One whole checkpoint of a chain, block by block: a table never has to fit memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from meseta.checkpoint.failures import reading
from meseta.checkpoint.files.block import sync_block, write_block
from meseta.checkpoint.files.chain import Entry, blocks_of, read_chain
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.paths import block_path, table_folder
from meseta.checkpoint.files.raw import copy_whole
from meseta.checkpoint.files.tensors import read_tensors
from meseta.checkpoint.manifest import CARRIED, made_whole, read_manifest
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.store import CheckpointStore, store_at
from meseta.machine.remote import Location, locate, location_exists
from meseta.spec import MesetaError
from meseta.spec.blocks import CHAIN_READERS


def compact(
    path: Location | str, out: Location | str, *, on_rows: Callable[[int], object] = lambda num_rows: None
) -> Location:
    """Write the checkpoint at `path`, a delta or not, as a whole one to `out/step-...`, and return where it is. It has
    the bytes that the run would have written there without deltas. `on_rows` is told of rows as they are written.

    Raises MesetaError where there is one of that step already, where a file of `path` is damaged or cannot be read, and
    on a full disk; then nothing stays.
    """
    path, store = locate(path), store_at(out)
    manifest = read_manifest(path)
    place = checkpoint_path(store.parent, manifest["step"])
    with reading(place):
        if location_exists(place):
            raise MesetaError(f"checkpoint {str(place)!r} exists; give another folder")
    try:
        with store.alone():
            return _write(path, store, manifest, on_rows)
    except OSError as error:
        reason = error.strerror or error
        raise MesetaError(f"checkpoint {str(store.parent)!r}: {reason}; make room there") from None


def _write(
    path: Location, store: CheckpointStore, manifest: dict[str, Any], on_rows: Callable[[int], object]
) -> Location:
    """All files of the whole one, and the commit."""
    growing = store.growing(manifest["step"])
    try:
        store.begin(manifest["step"], [table_folder(name) for name in manifest["tables"]])
        tables = {name: _write_table(path, growing, name, t, on_rows) for name, t in manifest["tables"].items()}
        for key in ("dense", CARRIED):
            if key in manifest:
                read_tensors(path, manifest[key])
                inner = manifest[key]["path"]
                copy_whole(path / inner, growing / inner, manifest[key]["num_bytes"])
        whole: Location = store.commit(growing, made_whole(manifest, tables))
    except BaseException:
        store.give_up(growing)
        raise
    return whole


def _write_table(
    path: Location, growing: Location, name: str, table: dict[str, Any], on_rows: Callable[[int], object]
) -> dict[str, Any]:
    """Its blocks, each in one file; its entry in the manifest of a whole checkpoint."""
    schema = BlockSchema.from_dict(table)

    def write(files: list[Entry]) -> dict[str, Any]:
        first = files[0]["first_row"]
        values = read_chain(path, schema, files)
        entry = write_block(growing, block_path(name, first // table["block_rows"]), schema, first, values)
        on_rows(entry["num_rows"])
        return entry

    with ThreadPoolExecutor(CHAIN_READERS) as pool:
        blocks = list(pool.map(write, blocks_of(table)))
        list(pool.map(partial(sync_block, growing), [entry["path"] for entry in blocks]))
    return {**table, "blocks": blocks}
