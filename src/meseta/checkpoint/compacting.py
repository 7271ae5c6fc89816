"""Merge a delta checkpoint and its base checkpoints block by block, so that no table has to fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from meseta.checkpoint.failures import wrap_read_errors
from meseta.checkpoint.files.block import (
    FileEntry,
    group_files_by_block,
    read_chain,
    read_tensors,
    sync_block,
    write_block,
)
from meseta.checkpoint.files.direct_io import copy_file
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.paths import block_path, table_folder
from meseta.checkpoint.manifest import PREFETCHED, full_manifest, read_manifest
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.store import CheckpointStore, make_store
from meseta.spec import MesetaError
from meseta.spec.shards import NUM_PARALLEL_CHAIN_READS
from meseta.system.remote import Location, location_exists, to_location


def compact(
    path: Location | str, out: Location | str, *, on_rows: Callable[[int], object] = lambda num_rows: None
) -> Location:
    """Write a full checkpoint with the content of the checkpoint at `path`, and return its location in `out`.

    The files are identical to those that the run would have written without deltas. `on_rows` receives the number of
    rows of each written block.

    Raises MesetaError if `out` has a checkpoint of this step, a file is damaged or unreadable, or the disk is full. The
    unfinished checkpoint is then deleted.
    """
    path, store = to_location(path), make_store(out)
    manifest = read_manifest(path)
    place = checkpoint_path(store.parent, manifest["step"])
    with wrap_read_errors(place):
        if location_exists(place):
            raise MesetaError(f"checkpoint {str(place)!r} exists already; choose another output folder")
    try:
        with store.lock():
            return _write_full_checkpoint(path, store, manifest, on_rows)
    except OSError as error:
        reason = error.strerror or error
        raise MesetaError(
            f"checkpoint folder {str(store.parent)!r} cannot be written: {reason}; free disk space"
        ) from None


def _write_full_checkpoint(
    path: Location, store: CheckpointStore, manifest: dict[str, Any], on_rows: Callable[[int], object]
) -> Location:
    growing = store.staging_path(manifest["step"])
    try:
        store.begin(manifest["step"], [table_folder(name) for name in manifest["tables"]])
        tables = {name: _write_table(path, growing, name, t, on_rows) for name, t in manifest["tables"].items()}
        for key in ("dense", PREFETCHED):
            if key in manifest:
                read_tensors(path, manifest[key])
                inner = manifest[key]["path"]
                copy_file(path / inner, growing / inner, manifest[key]["num_bytes"])
        whole: Location = store.commit(growing, full_manifest(manifest, tables))
    except BaseException:
        store.abort(growing)
        raise
    return whole


def _write_table(
    path: Location, growing: Location, name: str, table: dict[str, Any], on_rows: Callable[[int], object]
) -> dict[str, Any]:
    """Write each block to one file. Return the table's entry for the manifest of a full checkpoint."""
    schema = BlockSchema.from_dict(table)

    def write(files: list[FileEntry]) -> dict[str, Any]:
        first = files[0]["first_row"]
        values = read_chain(path, schema, files)
        entry = write_block(growing, block_path(name, first // table["block_rows"]), schema, first, values)
        on_rows(entry["num_rows"])
        return entry

    # The number of threads limits memory, because each block takes a multiple of its size.
    with ThreadPoolExecutor(NUM_PARALLEL_CHAIN_READS) as pool:
        blocks = list(pool.map(write, group_files_by_block(table)))
        list(pool.map(partial(sync_block, growing), [entry["path"] for entry in blocks]))
    return {**table, "blocks": blocks}
