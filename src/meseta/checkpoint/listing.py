"""Summaries of the checkpoints in a folder, read from their manifests only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import check_files, has_file, read_with_retry
from meseta.checkpoint.files.block import group_files_by_block
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
from meseta.spec import MesetaError
from meseta.storage import ROW
from meseta.system.remote import Location, location_is_folder, modification_time_s, to_location


@dataclass(frozen=True, kw_only=True)
class TableSummary:
    """Size, optimizer and checksum of one table of a checkpoint."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str
    """Data type of the rows, such as 'float32'."""
    optimizer: str
    states: tuple[str, ...]
    num_blocks: int
    num_bytes: int
    """Size of the table's files, including those of older checkpoints."""
    row_error: float
    """Largest quantization error of a value of a row, or 0 if all rows are exact."""
    checksum: str | None
    """SHA-256 checksum of rows and states. `None` for a delta, whose checksum `verify` computes."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """Content of one checkpoint, from its manifest and the sizes of its files."""

    path: Location
    step: int
    saved_at_s: float
    """Time at which the manifest was written, in seconds since the Unix epoch."""
    num_ranks: int
    """Number of ranks that saved the checkpoint."""
    tables: tuple[TableSummary, ...]
    """Tables, sorted by name."""
    dense_bytes: int
    carried_bytes: int
    """Size of the file with prefetched embeddings, or 0 if there is none."""
    reader: dict[str, Any] | None
    """Position in the training data."""
    checksum: str | None
    """SHA-256 checksum of the model: tables and dense tensors. `None` for a delta, whose checksum `verify` computes."""
    chain: str | None
    """SHA-256 digest over the digests of a delta's files. `None` for a full checkpoint."""
    policy: str | None
    """Delta policy, see `checkpoint.deltas`. `None` for a full checkpoint."""
    own_bytes: int
    """Size of the files in this checkpoint's folder, without the manifest."""
    needs: tuple[int, ...]
    """Steps of the older checkpoints whose files this one needs."""
    longest_chain: int
    """Largest number of files that any block needs."""

    @property
    def num_bytes(self) -> int:
        """Size of all files, including files of older checkpoints, without the manifest."""
        return self.dense_bytes + self.carried_bytes + sum(table.num_bytes for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Checkpoint in a folder, possibly damaged."""

    path: Location
    summary: CheckpointSummary | None
    """`None` if the checkpoint is damaged or unreadable."""
    problem: str
    """Reason why there is no summary, or an empty string."""
    is_readable: bool = True
    """`False` if a read failed, so that it is unknown whether the checkpoint is damaged."""


def find_checkpoint_folder(path: Location | str) -> Location:
    """Return the folder of checkpoints at `path`, or of the run at `path`. Raises MesetaError without checkpoints."""
    path = to_location(path)
    for folder in (path, checkpoint_location(path) if isinstance(path, Path) else path / "checkpoints"):
        if list_candidates(folder):
            return folder
    if not isinstance(path, Path):
        raise MesetaError(f"checkpoint {str(path)!r} holds no checkpoint; check the URL")
    what = "holds no checkpoint" if read_with_retry(None, path, lambda: location_is_folder(path)) else "is not a folder"
    raise MesetaError(f"checkpoint {str(path)!r} {what}; choose a run folder, or a folder that contains step-...")


def find_checkpoint(path: Location | str) -> Location:
    """Return `path` if it is a checkpoint, else the newest checkpoint of the run or folder, which may be damaged."""
    path = to_location(path)
    if has_file(path, MANIFEST_PATH):
        return path
    folder = find_checkpoint_folder(path)
    newest_path = newest(folder)
    if newest_path is None:
        raise MesetaError(f"checkpoint {str(folder)!r} holds no checkpoint; see `meseta checkpoint list`")
    return newest_path


def summarize(path: Location | str) -> CheckpointSummary:
    """Summarize a checkpoint. Raises MesetaError if the manifest is damaged or a file is missing or of another size,
    StorageError if reading fails."""
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
    """List all checkpoints of a run or folder, oldest first, including damaged and unreadable ones.

    Raises MesetaError if `path` holds no checkpoint, and StorageError if the folder cannot be read.
    """
    infos = []
    for inner in list_candidates(find_checkpoint_folder(path)):
        try:
            infos.append(CheckpointInfo(path=inner, summary=summarize(inner), problem=""))
        except MesetaError as error:
            is_readable = not isinstance(error, StorageError)
            infos.append(CheckpointInfo(path=inner, summary=None, problem=str(error), is_readable=is_readable))
    return infos
