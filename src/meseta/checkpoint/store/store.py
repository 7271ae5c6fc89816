"""Where the checkpoints of a run lie: a directory, or a URL. What is asked of either is asked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meseta.checkpoint.failures import DamagedCheckpoint, check_files, has_file, read_with_retry
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.checkpoint.manifest import MANIFEST_PATH, file_entries, read_manifest
from meseta.checkpoint.store.directory import DirectoryStore
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.objects import ObjectStore
from meseta.errors import StorageError
from meseta.machine.files import list_names
from meseta.machine.remote import Location, RemotePath, to_location
from meseta.spec import MesetaError


@runtime_checkable
class CheckpointStore(Protocol):
    """Checkpoints side by side, each there whole or not at all, killed whenever a run may be.

    A save is `begin` on one rank, files that all ranks write below `growing`, `commit` on one rank.
    """

    parent: Any
    """Where they lie."""
    writes_locally: bool
    """Whether a save waits for the links of ranks, so that each writes what it holds; or for a disk."""

    def open(self) -> None:
        """Register what is there now. From then on a new checkpoint of another process is an error."""

    def staging_path(self, step: int) -> Any:
        """Where a checkpoint grows before its commit; known to every rank."""

    def begin(self, step: int, folders: Sequence[str]) -> Any:
        """Clean up after killed runs, and make room for a checkpoint, with `folders` in it; returns `growing`."""

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from writing a checkpoint here. Raises MesetaError where one does so now, or has saved
        here since `open`."""

    def check_shared(self, growing: Any) -> None:
        """Raise MesetaError where this rank does not see what rank 0 has begun."""

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, or of what is left of one, by path inside it.

        A file whose stamp is unchanged has not been written since; an empty stamp says nothing.
        """

    def replacement_path(self, folder: str, inner: str) -> AbstractContextManager[Any]:
        """Where to write a file of an existing checkpoint, whose former file is replaced; it appears whole."""

    def commit(self, growing: Any, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None) -> Any:
        """Make a checkpoint of what has grown; returns where it lies."""

    def abort(self, growing: Any) -> None:
        """What has grown becomes no checkpoint."""

    def delete(self, doomed: Sequence[Any]) -> None:
        """Delete checkpoints, but the files that others need."""

    def discard(self, path: Any) -> None:
        """Delete a checkpoint, whoever may need its files."""

    def remove_all(self) -> None:
        """Delete all of them."""

    def list_candidates(self) -> list[Any]:
        """What is named as a checkpoint and may be one, by rising step."""

    def quarantine(self, path: Any, why: str) -> None:
        """Let a damaged checkpoint be none any more, with all that it has, until a new one takes its place."""

    def quarantined(self) -> list[Any]:
        """Those, by rising step."""

    def unrecognized_entries(self) -> list[Any]:
        """What is known to lie there beside them."""


def make_store(parent: Location | str | CheckpointStore) -> CheckpointStore:
    """The store of a directory or URL; `parent` itself if it is a store."""
    if isinstance(parent, CheckpointStore):
        return parent
    parent = to_location(parent)
    return ObjectStore(parent) if isinstance(parent, RemotePath) else DirectoryStore(parent)


def list_candidates(parent: Location | str) -> list[Location]:
    """What is named as a checkpoint there and may be one, by rising step."""
    return make_store(parent).list_candidates()


def latest_complete(parent: Location | str) -> Location | None:
    """The checkpoint of the highest step in `parent`, None when there is none; only looks, changes nothing.

    Temporary directories, and directories that lack their manifest or a file, are passed over. One whose manifest
    cannot be understood (damaged, or of another version) is not: `load` then says so, which is better than going back
    in silence. Raises StorageError where a read fails, so that nobody knows which one is newest.
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
    """The checkpoint of the highest step in `parent`, whole or not, None when there is none.

    What a run goes on from: `load` refuses it where it is damaged, and nothing goes back to an older one in silence.
    Raises StorageError where a read fails, so that nobody knows which one is newest.
    """
    for path in reversed(list_candidates(parent)):
        if not isinstance(path, Path) or read_with_retry(path, path, partial(list_names, path)):
            return path
    return None


def prune(parent: Location | str | CheckpointStore, keep_last: int, keep_step: int | None = None) -> list[Location]:
    """Delete all but the newest `keep_last` checkpoints in `parent`; returns those deleted, oldest first.

    The one of step `keep_step` is neither counted nor deleted. Only whole checkpoints count and are deleted. Files that
    others need stay until those are gone. To be called by one rank. Raises MesetaError when `keep_last` is below 1 or a
    checkpoint cannot be deleted, and StorageError, having deleted no file of any, when a read fails.
    """
    if keep_last < 1:
        raise MesetaError(f"checkpoint: keep_last must be at least 1, got {keep_last}")
    store = make_store(parent)
    kept = None if keep_step is None else checkpoint_path(store.parent, keep_step)
    others = [path for path in store.list_candidates() if path != kept]
    if len(others) <= keep_last:  # whole or not, which takes reading their manifests
        return []
    doomed = [path for path in others if _is_complete(path)][:-keep_last]
    try:
        store.delete(doomed)
    except OSError as error:
        raise MesetaError(f"checkpoint {str(error.filename)!r} cannot be deleted: {error.strerror}") from None
    return doomed


def check_writable(parent: Location) -> None:
    """Raise MesetaError where files at a URL cannot be made and deleted; a directory tells when it is made."""
    if isinstance(parent, RemotePath):
        trial = parent / ".tmp-trial"
        trial.delete()
        trial.create(b"to be deleted")
        trial.delete()


def _has_all_files(path: Location, manifest: Mapping[str, Any]) -> bool:
    """Whether every file that the manifest names is there with its size."""
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
