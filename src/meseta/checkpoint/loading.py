"""Loading of a checkpoint into the shards of any plan, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.checkpoint.failures import has_file, read_with_retry, run_on_all_ranks
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.block import FileEntry, Values, group_files_by_block, read_chain, read_tensors
from meseta.checkpoint.files.layout import BlockSchema, TableLayout
from meseta.checkpoint.files.paths import entry_step, is_block_path
from meseta.checkpoint.manifest import MANIFEST_PATH, PREFETCHED, full_step, read_manifest
from meseta.checkpoint.row_map import RowMap
from meseta.checkpoint.store.store import latest_complete
from meseta.comm import World
from meseta.ops.row_marks import Consumer
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import MesetaError
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.shards import NUM_PARALLEL_CHAIN_READS, NUM_PARALLEL_READS
from meseta.storage import ROW, TableStorage
from meseta.system.kernel import trim_heap
from meseta.system.remote import Location, location_is_folder, to_location
from meseta.system.waits import track_activity

ChangedRowsByShard = list[tuple[TableStorage, Tensor]]
"""Pairs of a shard and the ascending rows of one block changed since the last full checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _FillJob:
    """One block, and the shards to fill from it."""

    schema: BlockSchema
    files: list[FileEntry]
    """Files of the block, from oldest to newest."""
    is_new: bool
    """Whether all its rows changed since the last full checkpoint."""
    pieces: list[tuple[TableStorage, RowMap]]
    """Shards, with the maps from rows of the block."""
    with_states: bool


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Content of a checkpoint except its tables."""

    step: int
    dense: dict[str, Tensor]
    """Tensors of the dense part by name, on the CPU."""
    prefetched_embeddings: dict[str, Tensor] | None
    """Embeddings of the next batch by name, on the CPU. `None` if the checkpoint has none."""
    state: dict[str, Any]
    """State that the trainer passed to `save`. JSON has turned tuples into lists, and keys into strings."""
    manifest: dict[str, Any]
    """Complete manifest, including the plan of the saving run and the checksum of the model."""


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """Rows that a table takes over from a checkpoint. Other rows and optimizer states remain unchanged."""

    rows: RowMap
    """Map from rows of the checkpoint to rows of the table."""
    states: bool = True
    """Whether optimizer states are taken over with the rows."""


def load(
    path: Location | str,
    *,
    world: World,
    shards: Sequence[TableStorage],
    mark_changes_since_full: bool = False,
    sources: Mapping[str, TableSource] | None = None,
) -> LoadedCheckpoint:
    """Fill `shards`, this rank's shards under any plan, in place. Collective.

    Each rank reads and verifies the blocks that overlap its rows. The shards of all ranks must cover exactly the tables
    of the checkpoint. Row optimizers must have the same names as in the checkpoint, but may have other constants, such
    as the learning rate.

    With `sources`, only its tables are filled, and may have other rows. They must be in the checkpoint. A table whose
    states are not taken over may have another optimizer.

    Change marks of the consumer 'checkpoints' are cleared. With `mark_changes_since_full`, rows that changed between
    the last full checkpoint and this one are marked.

    Raises MesetaError on all ranks if a file is missing, truncated or changed, the format is of another version, or the
    tables of the model differ. Raises StorageError if a file cannot be read. Shards may be partly filled after an
    error.
    """
    path = to_location(path)
    with track_activity(f"loading {path.name}"):
        return _load(path, world, shards, mark_changes_since_full, sources)


def _load(
    path: Location,
    world: World,
    shards: Sequence[TableStorage],
    marks_since_whole: bool,
    sources: Mapping[str, TableSource] | None,
) -> LoadedCheckpoint:
    manifest = run_on_all_ranks(world, lambda: _find_manifest(path))
    if sources is None:
        held = {name for names in world.all_gather_object([piece.spec.name for piece in shards]) for name in names}
        run_on_all_ranks(world, lambda: check_tables("checkpoint", path, manifest["tables"], held, shards))
        tables = manifest["tables"].items()
        sources = {name: TableSource(rows=RowMap.identity(entry["num_embeddings"])) for name, entry in tables}
    else:
        run_on_all_ranks(world, lambda: _check_sources(path, manifest["tables"], sources, shards))
    dense = run_on_all_ranks(world, lambda: _fill_shards(path, manifest, shards, sources, marks_since_whole))
    prefetched = (
        run_on_all_ranks(world, lambda: read_tensors(path, manifest[PREFETCHED])) if PREFETCHED in manifest else None
    )
    state = dict(manifest["state"])
    if manifest["reader"] is not None:
        state["reader"] = manifest["reader"]
    return LoadedCheckpoint(
        step=manifest["step"], dense=dense, prefetched_embeddings=prefetched, state=state, manifest=manifest
    )


def read_first_rows(path: Location) -> dict[str, NDArray[Any]]:
    """Return row 0 of each table of a checkpoint, [1, D] in the dtype of `as_stored`. Raises the errors of `verify`."""
    rows = {}
    for name, entry in _find_manifest(path)["tables"].items():
        values = read_chain(path, BlockSchema.from_dict(entry), group_files_by_block(entry)[0])
        rows[name] = values[ROW][:1].copy()
    return rows


def verify(path: Location | str) -> str:
    """Read and check all files of a checkpoint in this process, and return the checksum of the model.

    For a delta, it is the checksum of a full checkpoint with the same content. Raises DamagedCheckpoint if a file is
    missing, truncated or changed, and StorageError if a file cannot be read.
    """
    path = to_location(path)
    with track_activity(f"verifying {path.name}"):
        return _verify(path)


def _verify(path: Location) -> str:
    manifest = _find_manifest(path)
    for key in ("dense", PREFETCHED):
        if key in manifest:
            read_tensors(path, manifest[key])
    tables = {}
    for name, table in manifest["tables"].items():
        schema, blocks = BlockSchema.from_dict(table), group_files_by_block(table)
        with ThreadPoolExecutor(_num_reader_threads(blocks)) as pool:
            checksums = list(pool.map(partial(_block_checksum, path, schema), blocks))
        tables[name] = {"checksum": digest.hash_table({**table, "blocks": checksums})}
    trim_heap()
    return digest.hash_model({**manifest, "tables": tables})


def _num_reader_threads(blocks: Sequence[Sequence[FileEntry]]) -> int:
    # Merging files and decoding rows takes additional memory per thread.
    is_plain = all(len(files) == 1 and is_block_path(files[0]["path"]) for files in blocks)
    return NUM_PARALLEL_READS if is_plain else NUM_PARALLEL_CHAIN_READS


def _block_checksum(path: Location, schema: BlockSchema, files: Sequence[FileEntry]) -> dict[str, str]:
    # The checksum is that of the block stored exactly in a single file.
    values = read_chain(path, schema, files)
    if len(files) == 1 and is_block_path(files[0]["path"]):
        return {"checksum": files[0]["checksum"]}
    return {"checksum": digest.hash_arrays(values[column.name] for column in schema.columns)}


def _find_manifest(path: Location) -> dict[str, Any]:
    is_folder = read_with_retry(path, path, lambda: location_is_folder(path))
    below = latest_complete(path) if is_folder and not has_file(path, MANIFEST_PATH) else None
    if below is not None:
        raise MesetaError(
            f"checkpoint {str(path)!r} is a folder of checkpoints; choose one of them, such as {str(below)!r}"
        )
    return read_manifest(path)


def check_tables(
    kind: Literal["checkpoint", "export"],
    path: Location,
    tables: Mapping[str, Any],
    held: Collection[str],
    shards: Sequence[TableStorage],
    *,
    states: bool = True,
) -> None:
    """Raise MesetaError unless the model has the tables of a checkpoint or export, in the same layout.

    Args:
        kind: Name of the source of `tables` in messages.
        path: Location of the source.
        tables: Manifest entries of the tables by name.
        held: Names of the model's tables on all ranks.
        shards: Shards of this rank.
        states: Whether row optimizers and their states must match too.
    """
    where = f"{kind} {str(path)!r}"
    for name in sorted(set(held) ^ set(tables)):
        missing, there = (kind, tables) if name in held else ("model", held)
        raise MesetaError(
            f"{where}: table {name!r} is missing in the {missing}, which has {', '.join(sorted(there)) or 'none'}; "
            f"give model and {kind} the same tables, or start without this {kind}"
        )
    for piece in shards:
        way_out = f"start without this {kind}"
        _check_layout(where, tables[piece.spec.name], piece, way_out, way_out if states else None, same_rows=True)


def _check_sources(
    path: Location, tables: Mapping[str, Any], sources: Mapping[str, TableSource], shards: Sequence[TableStorage]
) -> None:
    for piece in shards:
        name = piece.spec.name
        if name in sources:
            fresh = f"reinitialize it with --reset {name}"
            of_states = f"set --load tables,dense, or {fresh}" if sources[name].states else None
            _check_layout(f"checkpoint {str(path)!r}", tables[name], piece, fresh, of_states, same_rows=False)


def _check_layout(
    where: str,
    saved: Mapping[str, Any],
    piece: TableStorage,
    way_out: str,
    way_out_of_states: str | None,
    *,
    same_rows: bool,
) -> None:
    """Raise MesetaError unless a saved table has the layout of a shard. Optimizer states are compared if there is a way
    out of their differences."""
    expected = TableLayout.from_values(piece.spec, piece.values).to_dict()
    for field in (*(["num_embeddings"] if same_rows else []), "embedding_dim", "dtype"):
        if saved[field] != expected[field]:
            raise MesetaError(
                f"{where}: table {piece.spec.name!r} has {field} {saved[field]} there, but {expected[field]} in "
                f"the model; set it to {saved[field]} in the model, or {way_out}"
            )
    is_other = saved["optimizer"]["name"] != expected["optimizer"]["name"] or saved["columns"] != expected["columns"]
    if way_out_of_states is not None and is_other:
        raise MesetaError(
            f"{where}: table {piece.spec.name!r} was trained with {_describe_optimizer(saved)}, but the model uses "
            f"{_describe_optimizer(expected)}; use the same row optimizer in the model"
            f"{_freeze_hint(saved, expected)}, or {way_out_of_states}"
        )


def _freeze_hint(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    before, now = (entry["optimizer"]["name"] for entry in (saved, expected))
    # With lr=0, FTRL still changes rows if its penalties changed. For custom optimizers the effect is unknown.
    keeps_rows = before in USED_FIELDS and before != "ftrl"
    return " with lr=0, which freezes its rows" if now == "frozen" and keeps_rows else ""


def _describe_optimizer(entry: Mapping[str, Any]) -> str:
    states = [f"{c['name']} {c['dtype']} per {c['kind']}" for c in entry["columns"] if c["name"] != ROW]
    return f"row optimizer {entry['optimizer']['name']!r} (state: {', '.join(states) or 'none'})"


def _fill_shards(
    path: Location,
    manifest: Mapping[str, Any],
    shards: Sequence[TableStorage],
    sources: Mapping[str, TableSource],
    since_whole: bool,
) -> dict[str, Tensor]:
    jobs = list[_FillJob]()
    for name in sorted({piece.spec.name for piece in shards} & sources.keys()):
        entry, source = manifest["tables"][name], sources[name]
        schema = BlockSchema.from_dict(entry)
        maps = [(piece, source.rows.to_targets(*piece.shard.rows)) for piece in shards if piece.spec.name == name]
        for files in group_files_by_block(entry):
            first, num_rows = files[0]["first_row"], files[0]["num_rows"]
            pieces = [
                (piece, part) for piece, rows in maps if (part := rows.from_rows(first, first + num_rows)).num_rows
            ]
            if pieces:
                is_new = entry_step(files[0], manifest["step"]) > full_step(manifest)
                job = _FillJob(schema=schema, files=files, is_new=is_new, pieces=pieces, with_states=source.states)
                jobs.append(job)

    with ThreadPoolExecutor(_num_reader_threads([job.files for job in jobs])) as pool:
        changed = {id(piece): RowSet(piece.shard.num_rows) for piece in shards}
        for of_block in pool.map(partial(_fill_shards_from_block, path, since_whole), jobs):
            for piece, of_piece in of_block:
                changed[id(piece)].add(of_piece)
    trim_heap()
    for piece in shards:
        piece.marks.clear(Consumer.CHECKPOINTS)
        piece.marks.add_set(changed[id(piece)], Consumer.CHECKPOINTS)
    return read_tensors(path, manifest["dense"])


def _fill_shards_from_block(path: Location, since_whole: bool, job: _FillJob) -> ChangedRowsByShard:
    # With `since_whole`, the result has the rows that changed since the last full checkpoint, otherwise nothing.
    is_changed = np.full(job.files[0]["num_rows"], job.is_new) if since_whole else None
    values = read_chain(path, job.schema, job.files, is_changed)
    if not job.with_states:
        values = {ROW: values[ROW]}
    changed: ChangedRowsByShard = []
    for piece, row_map in job.pieces:
        fill_rows(piece, job.schema, row_map, values)
        if is_changed is None:
            continue
        for source, target in row_map.parts():
            here = np.flatnonzero(is_changed[source])
            rows = here + target.start if isinstance(target, slice) else target[here]
            changed.append((piece, torch.from_numpy(rows)))
    return changed


def fill_rows(piece: TableStorage, schema: BlockSchema, row_map: RowMap, values: Values) -> None:
    """Copy rows of a block to a shard by a map between both. Columns that are not in `values` remain unchanged."""
    for source, target in row_map.parts():
        shared = {}
        for column in (c for c in schema.columns if c.name in values):
            rows = values[column.name][source]
            shared[column.name] = rows[:, slice(*piece.shard.columns)] if column.kind == "element" else rows
        if isinstance(target, slice):
            piece.write(target.start, shared)
        else:
            piece.scatter(torch.from_numpy(target), shared)
