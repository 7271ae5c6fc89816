"""What is in a folder of checkpoints, and what is in one of them, by their manifests alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import check_files, has_file, read_with_retry
from meseta.checkpoint.files.chain import group_files_by_block
from meseta.checkpoint.files.paths import entry_step
from meseta.checkpoint.manifest import (
    DELTAS,
    MANIFEST_PATH,
    PREFETCHED,
    QUANTIZED,
    file_entries,
    own_file_entries,
    read_manifest,
)
from meseta.checkpoint.store.store import list_candidates, newest
from meseta.config.load import checkpoint_location
from meseta.errors import StorageError
from meseta.machine.remote import Location, location_is_folder, modification_time_s, to_location
from meseta.spec import MesetaError
from meseta.storage import ROW


@dataclass(frozen=True, kw_only=True)
class TableSummary:
    """One table of a checkpoint."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str
    """Of the rows, for example 'float32'."""
    optimizer: str
    """Name of the row optimizer."""
    states: tuple[str, ...]
    """Names of its states."""
    num_blocks: int
    num_bytes: int
    """Of its files, those of older checkpoints among them."""
    row_error: float
    """The largest error of a value of a row; 0 where all are exact."""
    checksum: str | None
    """SHA-256 of rows and states, as the format defines it; None of a delta, whose files tell it together: see
    `verify`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint; nothing but its manifest and the sizes of its files was read."""

    path: Location
    step: int
    """Steps that were trained."""
    saved_at_s: float
    """When the manifest was written, in seconds of the Unix clock."""
    num_ranks: int
    """Ranks that saved it; any number can load it."""
    tables: tuple[TableSummary, ...]
    """By name."""
    dense_bytes: int
    """Of the file of dense tensors."""
    carried_bytes: int
    """Of that of answers to the batch to come; 0 where there is none."""
    reader: dict[str, Any] | None
    """Position in the data."""
    checksum: str | None
    """SHA-256 that names the model: tables and dense tensors; None of a delta, whose files tell it together: see
    `verify`."""
    chain: str | None
    """Of a delta, SHA-256 over the digests of its files instead."""
    policy: str | None
    """Of a delta, see `checkpoint.deltas`."""
    own_bytes: int
    """Of its own files but the manifest."""
    needs: tuple[int, ...]
    """Steps of the older checkpoints whose files it needs."""
    longest_chain: int
    """The most files that any row needs."""

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest, those of older checkpoints among them."""
        return self.dense_bytes + self.carried_bytes + sum(table.num_bytes for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One name in a folder of checkpoints."""

    path: Location
    summary: CheckpointSummary | None
    """None where the checkpoint is damaged or cannot be read."""
    problem: str
    """What is wrong with it; empty where nothing is known to be."""
    is_readable: bool = True
    """False if a read failed, so that nobody knows whether the checkpoint is damaged."""


def find_checkpoint_folder(path: Location | str) -> Location:
    """The folder of checkpoints that `path` is or, as the directory of a run, has; raises MesetaError for neither."""
    path = to_location(path)
    for folder in (path, checkpoint_location(path) if isinstance(path, Path) else path / "checkpoints"):
        if list_candidates(folder):
            return folder
    if not isinstance(path, Path):
        raise MesetaError(f"checkpoint {str(path)!r} holds no checkpoint; check the URL")
    what = "holds no checkpoint" if read_with_retry(None, path, lambda: location_is_folder(path)) else "is no directory"
    raise MesetaError(f"checkpoint {str(path)!r} {what}; give the directory of a run, or one with step-... in it")


def find_checkpoint(path: Location | str) -> Location:
    """`path` itself where it is a checkpoint, else the newest one, whole or not, of the run or folder that it is."""
    path = to_location(path)
    if has_file(path, MANIFEST_PATH):
        return path
    folder = find_checkpoint_folder(path)
    found = newest(folder)
    if found is None:
        raise MesetaError(f"checkpoint {str(folder)!r} holds no checkpoint; see `meseta checkpoint list`")
    return found


def summarize(path: Location | str) -> CheckpointSummary:
    """What a checkpoint holds. Raises MesetaError for a damaged manifest, and a file that lacks or has another size;
    StorageError where that cannot be read."""
    path = to_location(path)
    manifest = read_manifest(path)
    check_files(path, file_entries(manifest))
    tables = [
        TableSummary(
            name=name,
            num_embeddings=entry["num_embeddings"],
            embedding_dim=entry["embedding_dim"],
            dtype=entry["dtype"],
            optimizer=entry["optimizer"]["name"],
            states=tuple(column["name"] for column in entry["columns"] if column["name"] != ROW),
            num_blocks=len(group_files_by_block(entry)),
            num_bytes=sum(file["num_bytes"] for file in entry["blocks"]),
            row_error=manifest.get(QUANTIZED, {}).get(name, {}).get(ROW, 0.0),
            checksum=entry.get("checksum"),
        )
        for name, entry in sorted(manifest["tables"].items())
    ]
    return CheckpointSummary(
        path=path,
        step=manifest["step"],
        saved_at_s=read_with_retry(path, path / MANIFEST_PATH, lambda: modification_time_s(path / MANIFEST_PATH)),
        num_ranks=manifest["plan"]["num_ranks"],
        tables=tuple(tables),
        dense_bytes=manifest["dense"]["num_bytes"],
        carried_bytes=manifest[PREFETCHED]["num_bytes"] if PREFETCHED in manifest else 0,
        reader=manifest["reader"],
        checksum=manifest.get("checksum"),
        chain=manifest.get("chain"),
        policy=manifest[DELTAS]["policy"] if DELTAS in manifest else None,
        own_bytes=sum(entry["num_bytes"] for entry in own_file_entries(manifest)),
        needs=tuple(
            sorted({entry_step(entry, manifest["step"]) for entry in file_entries(manifest)} - {manifest["step"]})
        ),
        longest_chain=max(
            (len(b) for table in manifest["tables"].values() for b in group_files_by_block(table)), default=1
        ),
    )


def list_checkpoints(path: Location | str) -> list[CheckpointInfo]:
    """All checkpoints of a run or folder, the oldest first, with those that are damaged or cannot be read. Raises
    MesetaError for another path, and StorageError where the folder itself cannot be read."""
    found = []
    for inner in list_candidates(find_checkpoint_folder(path)):
        try:
            found.append(CheckpointInfo(path=inner, summary=summarize(inner), problem=""))
        except MesetaError as error:
            is_readable = not isinstance(error, StorageError)
            found.append(CheckpointInfo(path=inner, summary=None, problem=str(error), is_readable=is_readable))
    return found
