"""Store of checkpoints at a URL. Each checkpoint appears when its manifest is written, which is the last file."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meseta.checkpoint.failures import check_no_concurrent_saves, concurrent_writer_error, has_file, read_with_retry
from meseta.checkpoint.files.block import DENSE_PATH
from meseta.checkpoint.files.direct_io import WriteRateLimiter
from meseta.checkpoint.files.paths import (
    CHECKPOINT_NAME_PATTERN,
    QUARANTINE_MARKER,
    QUARANTINE_MARKERS,
    checkpoint_name,
    parse_step,
)
from meseta.checkpoint.manifest import MANIFEST_PATH, own_file_entries, referenced_files, write_manifest
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.remote import RETRY_DELAYS_S, RemotePath

# Object stores have no rename. A file is created only if it does not exist, so the second of two runs that write to the
# same place fails. A deletion removes the manifest first. A killed run may leave a folder without a manifest, a file
# that no manifest names, parts of an upload, or a lock. The next save collects them.
#
# A save holds a lock: a file `.writing-000001` next to the checkpoints, which only one process can create. Whether the
# holder of a lock still runs is unknown. Therefore a store regards all locks that exist at `open` as left behind, and
# creates a lock with the next number. The holder of a lower number no longer commits.
_LOCK_PATTERN = re.compile(r"\.writing-([0-9]{6})")


class ObjectStore:
    """Store of checkpoints at a URL. Methods raise MesetaError if the URL cannot be reached or rejects a request."""

    writes_locally = True

    def __init__(self, parent: RemotePath) -> None:
        self.parent = parent
        # Checkpoints that existed at `open` or that this store wrote. `None` before `open`.
        self._known_names: set[str] | None = None
        # Contents of locks that no process holds: those that existed at `open`, and those of this store. `None` before
        # `open`.
        self._stale_tokens: set[bytes] | None = None
        self._lock: RemotePath | None = None
        self._token = b""

    def open(self) -> None:
        """Record the existing checkpoints and locks. Afterwards, a new one from another process is an error."""
        self._stale_tokens = {self._read_token(lock) for lock in self._list_locks()}
        self._known_names = {path.name for path in (*self.list_candidates(), *self.quarantined())}

    def staging_path(self, step: int) -> RemotePath:
        """Return the final location of the checkpoint. It is not visible as a checkpoint before its manifest is
        written."""
        return self.parent / checkpoint_name(step)

    def begin(self, step: int, folders: Sequence[str]) -> RemotePath:
        """Clean up after killed runs. Raises MesetaError if a checkpoint of this step exists."""
        growing = self.staging_path(step)
        if _is_quarantined(growing):
            self.discard(growing)
        if has_file(growing, MANIFEST_PATH):
            raise concurrent_writer_error(growing)
        try:
            self._remove_files(self._unreferenced_files())
        except StorageError:
            # Leftover files would look like those of another run.
            if growing.files():
                raise
        return growing

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager that holds the lock. Raises MesetaError if another process holds it, or has saved here since
        `open`."""
        former = self._acquire()
        try:
            for lock in former:
                lock.delete()
            check_no_concurrent_saves(
                self.list_candidates() if self._known_names is not None else (), self._known_names
            )
            yield
        finally:
            current, self._lock = self._lock, None
            # If the deletion fails, the next run finds the lock at `open` and regards it as left behind.
            with contextlib.suppress(MesetaError):
                if current is not None and self._read_token(current) == self._token:
                    current.delete()

    def _acquire(self) -> list[RemotePath]:
        """Create a lock, and return those left behind. Waits a few seconds for another holder."""
        for wait_s in (*RETRY_DELAYS_S, None):
            locks = self._list_locks()
            number = max((int(lock.name[-6:]) for lock in locks), default=0) + 1
            lock = self.parent / f".writing-{number:06d}"
            held = [other for other in locks if not self._is_stale(other)]
            if not held and self._create_lock(lock):
                self._lock = lock
                return locks
            if wait_s is None:
                raise concurrent_writer_error((held or [lock])[0])
            time.sleep(wait_s)
        raise AssertionError

    def _is_stale(self, lock: RemotePath) -> bool:
        return self._stale_tokens is None or self._read_token(lock) in self._stale_tokens

    def _create_lock(self, lock: RemotePath) -> bool:
        # The result is false if another process has created the lock.
        self._token = secrets.token_hex(16).encode()
        try:
            lock.create(self._token)
        except FileExistsError:
            return False
        if self._stale_tokens is not None:
            self._stale_tokens.add(self._token)
        return True

    def _list_locks(self) -> list[RemotePath]:
        names = [
            name for name, is_folder in self.parent.entries().items() if not is_folder and _LOCK_PATTERN.fullmatch(name)
        ]
        return [self.parent / name for name in sorted(names)]

    @staticmethod
    def _read_token(lock: RemotePath) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return lock.read(0, 64)
        return b""

    def _check_lock_held(self) -> None:
        if self._lock is not None and (
            self._list_locks() != [self._lock] or self._read_token(self._lock) != self._token
        ):
            raise concurrent_writer_error(self._lock)

    def check_shared(self, growing: RemotePath) -> None:
        pass  # All ranks write to the same URL.

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint by path inside it. Also works for a pruned checkpoint."""
        return (self.parent / folder).files_with_stamps()

    def replacement_path(self, folder: str, inner: str) -> AbstractContextManager[RemotePath]:
        """Delete the file, and return a context manager that yields its path."""
        path = self.parent / folder / inner
        path.delete()
        return nullcontext(path)

    def commit(
        self, growing: RemotePath, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None
    ) -> RemotePath:
        """Write the manifest, which makes the files a checkpoint. Raises MesetaError if the manifest exists or a file
        differs."""
        there = growing.files()
        for entry in own_file_entries(manifest):
            if there.get(entry["path"]) != entry["num_bytes"]:
                raise concurrent_writer_error(growing / entry["path"])
        # Check after the listing: if this process still holds the lock, the listed files are its own.
        self._check_lock_held()
        write_manifest(growing, manifest, rate)
        try:
            self._check_lock_held()
        except MesetaError:  # The process that took the lock may be deleting the files.
            (growing / MANIFEST_PATH).delete()
            raise
        if self._known_names is not None:
            self._known_names.add(growing.name)
        return growing

    def abort(self, growing: RemotePath) -> None:
        pass  # The next save deletes the files. The store may be unreachable now, or in use by another run.

    def delete(self, doomed: Sequence[RemotePath]) -> None:
        """Delete checkpoints, manifests first, but no files that others need. All reads precede the first deletion."""
        with nullcontext() if self._lock is not None else self.lock():
            unneeded = self._unreferenced_files(doomed)
            for path in doomed:
                (path / MANIFEST_PATH).delete()
            self._remove_files(unneeded)

    def discard(self, path: RemotePath) -> None:
        """Delete a checkpoint, its manifest first, including files that other checkpoints need."""
        (path / MANIFEST_PATH).delete()
        path.delete(recursive=True)

    def remove_all(self) -> None:
        """Delete all checkpoints, locks and unfinished uploads."""
        for path in self._checkpoint_folders():
            self.discard(path)
        for lock in self._list_locks():
            lock.delete()
        self.parent.abort_uploads()

    def list_candidates(self) -> list[RemotePath]:
        """Return the folders that have the name of a checkpoint and a manifest, ordered by step, without quarantined
        ones."""
        listed = {path: read_with_retry(path, path, path.entries) for path in self._checkpoint_folders()}
        return [
            path
            for path, names in listed.items()
            if MANIFEST_PATH in names and names.keys().isdisjoint(QUARANTINE_MARKERS)
        ]

    def quarantine(self, path: RemotePath, why: str) -> None:
        (path / QUARANTINE_MARKER).create(f"{why}\n".encode())

    def quarantined(self) -> list[RemotePath]:
        return [path for path in self._checkpoint_folders() if _is_quarantined(path)]

    def unrecognized_entries(self) -> list[RemotePath]:
        """Return an empty list, because a URL may contain any other files."""
        return []

    def _unreferenced_files(self, doomed: Collection[RemotePath] = ()) -> dict[RemotePath, set[RemotePath] | None]:
        """Return unreferenced files by folder, except those of `doomed` checkpoints. `None` means all files of a
        folder."""
        paths = self._checkpoint_folders()
        files = {path: {path / inner for inner in read_with_retry(path, path, path.files)} for path in paths}
        paths = [path for path in paths if files[path].isdisjoint(path / name for name in QUARANTINE_MARKERS)]
        checkpoints = [path for path in paths if path / MANIFEST_PATH in files[path] and path not in doomed]
        needed = referenced_files(checkpoints)
        if needed is None:
            return {}
        unneeded: dict[RemotePath, set[RemotePath] | None] = {}
        for path in paths:
            # `referenced_files` skips damaged checkpoints, so none of their files is in `needed`.
            if path in checkpoints and path / DENSE_PATH not in needed:
                continue
            is_whole = files[path].isdisjoint(needed)
            unneeded[path] = None if is_whole else files[path] - needed - {path / MANIFEST_PATH}
        return unneeded

    def _remove_files(self, unneeded: Mapping[RemotePath, Collection[RemotePath] | None]) -> None:
        self.parent.abort_uploads()
        for path, files in unneeded.items():
            if files is None:
                path.delete(recursive=True)
            for file in files or ():
                file.delete()

    def _checkpoint_folders(self) -> list[RemotePath]:
        folders = read_with_retry(None, self.parent, self.parent.folders)
        names = [name for name in folders if (match := CHECKPOINT_NAME_PATTERN.fullmatch(name)) and not match["old"]]
        return sorted((self.parent / name for name in names), key=parse_step)


def _is_quarantined(path: RemotePath) -> bool:
    return any(has_file(path, name) for name in QUARANTINE_MARKERS)
