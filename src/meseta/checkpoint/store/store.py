"""Common interface of the stores of checkpoints: folders and URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meseta.checkpoint.failures import DamagedCheckpoint, check_files, has_file, read_with_retry
from meseta.checkpoint.files.direct_io import WriteRateLimiter
from meseta.checkpoint.files.paths import checkpoint_path
from meseta.checkpoint.manifest import MANIFEST_PATH, file_entries, read_manifest
from meseta.checkpoint.store.directory import DirectoryStore
from meseta.checkpoint.store.objects import ObjectStore
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.files import list_names
from meseta.system.remote import Location, RemotePath, to_location


@runtime_checkable
class CheckpointStore(Protocol):
    """Store of checkpoints that appear atomically, even if a run is killed at any time.

    To save, one rank calls `begin`, all ranks write files below its result `growing`, and one rank calls `commit`.
    """

    parent: Any
    writes_locally: bool
    """Whether each rank should write the blocks that it holds. Otherwise ranks take turns, because the disk is the
    bottleneck."""

    def open(self) -> None:
        """Record the existing checkpoints. Afterwards, a new checkpoint from another process is an error."""

    def staging_path(self, step: int) -> Any:
        """Return the location in which a checkpoint is written before its commit. It is the same on all ranks."""

    def begin(self, step: int, folders: Sequence[str]) -> Any:
        """Clean up after killed runs, and prepare a checkpoint with `folders` in it. Return its staging path."""

    def lock(self) -> AbstractContextManager[None]:
        """Context manager that keeps other processes from writing to this store. Raises MesetaError if one is
        writing a checkpoint, or has saved one since `open`."""

    def check_shared(self, growing: Any) -> None:
        """Raise MesetaError if this rank cannot see the staging path that rank 0 created."""

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint by path inside it. Also works for a pruned checkpoint.

        A file with an unchanged stamp has not been written since. An empty stamp means that nothing is known.
        """

    def replacement_path(self, folder: str, inner: str) -> AbstractContextManager[Any]:
        """Context manager that yields a path for a new version of a checkpoint's file, which appears atomically."""

    def commit(self, growing: Any, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None) -> Any:
        """Turn the files below `growing` into a checkpoint, and return its location."""

    def abort(self, growing: Any) -> None:
        """Discard an unfinished checkpoint."""

    def delete(self, doomed: Sequence[Any]) -> None:
        """Delete checkpoints, but keep files that other checkpoints need."""

    def discard(self, path: Any) -> None:
        """Delete a checkpoint, including files that other checkpoints need."""

    def remove_all(self) -> None:
        """Delete all checkpoints."""

    def list_candidates(self) -> list[Any]:
        """Return the locations that have the name of a checkpoint and may be complete, ordered by step."""

    def quarantine(self, path: Any, why: str) -> None:
        """Mark a damaged checkpoint as quarantined, and keep its files. A new checkpoint of its step replaces it."""

    def quarantined(self) -> list[Any]:
        """Return the quarantined checkpoints, ordered by step."""

    def unrecognized_entries(self) -> list[Any]:
        """Return the known entries of the store that are not checkpoints."""


def make_store(parent: Location | str | CheckpointStore) -> CheckpointStore:
    """Return the store of a folder or URL. If `parent` is a store, return it unchanged."""
    if isinstance(parent, CheckpointStore):
        return parent
    parent = to_location(parent)
    return ObjectStore(parent) if isinstance(parent, RemotePath) else DirectoryStore(parent)


def list_candidates(parent: Location | str) -> list[Location]:
    """Return the locations in `parent` that have the name of a checkpoint and may be complete, ordered by step."""
    return make_store(parent).list_candidates()


def latest_complete(parent: Location | str) -> Location | None:
    """Return the checkpoint with the highest step that has all its files, or `None` if there is none. Changes nothing.

    A checkpoint with a damaged or unknown manifest counts as complete, so that `load` reports it instead of silently
    loading an older one. Raises StorageError if a read fails, because the newest checkpoint is then unknown.
    """
    for path in reversed(list_candidates(parent)):
        if has_file(path, MANIFEST_PATH):
            try:
                manifest = read_manifest(path)
            except StorageError:
                raise
            except MesetaError:
                return path
            if _has_all_files(path, manifest):
                return path
    return None


def newest(parent: Location | str) -> Location | None:
    """Return the checkpoint with the highest step, which may be damaged, or `None` if there is none.

    A run resumes from it. `load` rejects a damaged one, instead of silently loading an older one. Raises StorageError
    if a read fails, because the newest checkpoint is then unknown.
    """
    for path in reversed(list_candidates(parent)):
        if not isinstance(path, Path) or read_with_retry(path, path, partial(list_names, path)):
            return path
    return None


def prune(parent: Location | str | CheckpointStore, keep_last: int, keep_step: int | None = None) -> list[Location]:
    """Delete all but the newest `keep_last` checkpoints, and return the deleted ones, oldest first.

    Only complete checkpoints are counted and deleted. The checkpoint of step `keep_step` is neither. Files that
    remaining checkpoints need are kept until those are deleted. Call it on one rank.

    Raises MesetaError if `keep_last` is less than 1 or a checkpoint cannot be deleted. Raises StorageError before any
    deletion if a read fails.
    """
    if keep_last < 1:
        raise MesetaError(f"checkpoint: keep_last must be at least 1, got {keep_last}")
    store = make_store(parent)
    kept = None if keep_step is None else checkpoint_path(store.parent, keep_step)
    others = [path for path in store.list_candidates() if path != kept]
    # Return early, without reading manifests.
    if len(others) <= keep_last:
        return []
    doomed = [path for path in others if _is_complete(path)][:-keep_last]
    try:
        store.delete(doomed)
    except OSError as error:
        raise MesetaError(f"checkpoint {str(error.filename)!r} cannot be deleted: {error.strerror}") from None
    return doomed


def check_writable(parent: Location) -> None:
    """Raise MesetaError if files at a URL cannot be created and deleted. Folders are not checked."""
    # A folder that is not writable fails when it is created.
    if isinstance(parent, RemotePath):
        trial = parent / ".tmp-trial"
        trial.delete()
        trial.create(b"to be deleted")
        trial.delete()


def _has_all_files(path: Location, manifest: Mapping[str, Any]) -> bool:
    try:
        check_files(path, file_entries(manifest))
    except DamagedCheckpoint:
        return False
    return True


def _is_complete(path: Location) -> bool:
    try:
        return _has_all_files(path, read_manifest(path))
    except StorageError:
        raise
    except MesetaError:
        return False
