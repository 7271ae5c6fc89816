"""Checkpoints at a URL, where nothing can be renamed: each appears with its manifest, which is written last.

All files of a checkpoint are made only where there are none, so that two runs that write to one place meet: the second
is refused. Deleting takes the manifest first. What a killed run leaves is a folder without a manifest, a file that no
manifest names, parts of an upload, or its lock; the next save collects it.

A save holds a lock, a file `.writing-000001` next to the checkpoints that only one process can create. Nobody can tell
whether the holder of a lock still runs. Therefore a store regards locks that it found when it was opened as left
behind, and creates the next number instead; the holder of a lower number no longer commits.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meseta.checkpoint.failures import check_no_concurrent_saves, concurrent_writer_error, has_file, read_with_retry
from meseta.checkpoint.files.paths import CHECKPOINT_NAME_PATTERN
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.checkpoint.files.tensors import DENSE_PATH
from meseta.checkpoint.manifest import MANIFEST_PATH, own_file_entries, write_manifest
from meseta.checkpoint.store.names import QUARANTINE_MARKER, QUARANTINE_MARKERS, checkpoint_name, parse_step
from meseta.checkpoint.store.references import referenced_files
from meseta.errors import StorageError
from meseta.machine.remote import RETRY_DELAYS_S, RemotePath
from meseta.spec import MesetaError

_LOCK_PATTERN = re.compile(r"\.writing-([0-9]{6})")


class ObjectStore:
    """Checkpoints below a URL. Its methods raise MesetaError, naming it, where it cannot be reached, or refuses."""

    writes_locally = True

    def __init__(self, parent: RemotePath) -> None:
        self.parent = parent
        self._known_names: set[str] | None = None
        """Names of checkpoints that this store found when it was opened or has written; `None` if it was not opened."""
        self._stale_tokens: set[bytes] | None = None
        """Contents of locks that nobody holds: those found when this store was opened, and its own."""
        self._lock: RemotePath | None = None
        self._token = b""
        """Content of `_lock`."""

    def open(self) -> None:
        """Register what is there now. From then on a new checkpoint or lock of another process is an error."""
        self._stale_tokens = {self._read_token(lock) for lock in self._list_locks()}
        self._known_names = {path.name for path in (*self.list_candidates(), *self.quarantined())}

    def staging_path(self, step: int) -> RemotePath:
        """Where a checkpoint grows before its commit: in its place, unseen without a manifest."""
        return self.parent / checkpoint_name(step)

    def begin(self, step: int, folders: Sequence[str]) -> RemotePath:
        """Clean up after killed runs; raises MesetaError where a checkpoint of this step is there."""
        growing = self.staging_path(step)
        if _is_quarantined(growing):
            self.discard(growing)
        if has_file(growing, MANIFEST_PATH):
            raise concurrent_writer_error(growing)
        try:
            self.collect_garbage()
        except StorageError:
            if growing.files():  # they would be taken for another run's
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
            own, self._lock = self._lock, None
            with contextlib.suppress(MesetaError):  # a lock that stays is known to be left behind
                if own is not None and self._read_token(own) == self._token:
                    own.delete()

    def _acquire(self) -> list[RemotePath]:
        """Create a lock; returns those that are left behind. Waits a few seconds for a holder that may be refused."""
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
        """Whether this process has created the lock, not another one."""
        self._token = secrets.token_hex(16).encode()
        try:
            lock.create(self._token)
        except FileExistsError:
            return False
        if self._stale_tokens is not None:
            self._stale_tokens.add(self._token)
        return True

    def _list_locks(self) -> list[RemotePath]:
        """By rising number."""
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
        """Raise MesetaError if another process has taken the lock from this one."""
        if self._lock is not None and (
            self._list_locks() != [self._lock] or self._read_token(self._lock) != self._token
        ):
            raise concurrent_writer_error(self._lock)

    def check_shared(self, growing: RemotePath) -> None:
        """Every rank writes to the same URL."""

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, or of what is left of one, by path inside it."""
        return (self.parent / folder).files_with_stamps()

    def replacement_path(self, folder: str, inner: str) -> AbstractContextManager[RemotePath]:
        """Where to write a file of an existing checkpoint: in its place, once a former one is deleted."""
        path = self.parent / folder / inner
        path.delete()
        return nullcontext(path)

    def commit(
        self, growing: RemotePath, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None
    ) -> RemotePath:
        """Write the manifest of a checkpoint whose files are there, if there is none: from then on it is one."""
        there = growing.files()
        for entry in own_file_entries(manifest):
            if there.get(entry["path"]) != entry["num_bytes"]:
                raise concurrent_writer_error(growing / entry["path"])
        self._check_lock_held()  # after the listing, which therefore shows this process's files
        write_manifest(growing, manifest, rate)
        try:
            self._check_lock_held()
        except MesetaError:  # whoever took the lock may be deleting the files
            (growing / MANIFEST_PATH).delete()
            raise
        if self._known_names is not None:
            self._known_names.add(growing.name)
        return growing

    def abort(self, growing: RemotePath) -> None:
        """Leave what has not become a checkpoint to the next save: the store may be out of reach, or another run's."""

    def delete(self, doomed: Sequence[RemotePath]) -> None:
        """Delete checkpoints, their manifests first, but the files that others need. Nothing is deleted before all is
        read that this depends on."""
        with nullcontext() if self._lock is not None else self.lock():
            unneeded = self._unreferenced_files(doomed)
            for path in doomed:
                (path / MANIFEST_PATH).delete()
            self._remove_files(unneeded)

    def discard(self, path: RemotePath) -> None:
        """Delete a checkpoint, its manifest first, whoever may need its files."""
        (path / MANIFEST_PATH).delete()
        path.delete(recursive=True)

    def remove_all(self) -> None:
        """Delete all checkpoints, and what killed runs left of others."""
        for path in self._checkpoint_folders():
            self.discard(path)
        for lock in self._list_locks():
            lock.delete()
        self.parent.abort_uploads()

    def list_candidates(self) -> list[RemotePath]:
        """Folders named as checkpoints that have a manifest, by rising step; none that was passed over."""
        listed = {path: read_with_retry(path, path, path.entries) for path in self._checkpoint_folders()}
        return [
            path
            for path, names in listed.items()
            if MANIFEST_PATH in names and names.keys().isdisjoint(QUARANTINE_MARKERS)
        ]

    def quarantine(self, path: RemotePath, why: str) -> None:
        """Let a damaged checkpoint be none any more, with all that it has, until a new one takes its place."""
        (path / QUARANTINE_MARKER).create(f"{why}\n".encode())

    def quarantined(self) -> list[RemotePath]:
        """Those, by rising step."""
        return [path for path in self._checkpoint_folders() if _is_quarantined(path)]

    def unrecognized_entries(self) -> list[RemotePath]:
        """None are told of: a store may hold anything beside."""
        return []

    def collect_garbage(self) -> None:
        """Delete what killed runs left: unfinished uploads, and files of checkpoints that no manifest names. Nothing is
        deleted of a checkpoint that is damaged, and no file where one is of a later version."""
        self._remove_files(self._unreferenced_files())

    def _unreferenced_files(self, doomed: Collection[RemotePath] = ()) -> dict[RemotePath, set[RemotePath] | None]:
        """Files that no manifest but those of `doomed` names, by folder; `None` for a folder with no other file."""
        paths = self._checkpoint_folders()
        files = {path: {path / inner for inner in read_with_retry(path, path, path.files)} for path in paths}
        paths = [
            path for path in paths if files[path].isdisjoint(path / name for name in QUARANTINE_MARKERS)
        ]  # others are left alone
        checkpoints = [path for path in paths if path / MANIFEST_PATH in files[path] and path not in doomed]
        needed = referenced_files(checkpoints)
        if needed is None:
            return {}
        unneeded: dict[RemotePath, set[RemotePath] | None] = {}
        for path in paths:
            if path in checkpoints and path / DENSE_PATH not in needed:
                continue  # damaged
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
