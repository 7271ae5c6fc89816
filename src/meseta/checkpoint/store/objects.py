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

from meseta.checkpoint.failures import check_known, has_file, read, taken
from meseta.checkpoint.files.paths import NAME
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.files.tensors import DENSE_PATH
from meseta.checkpoint.manifest import MANIFEST_PATH, own_entries, write_manifest
from meseta.checkpoint.store.names import PASSED_OVER, checkpoint_name, named_step
from meseta.checkpoint.store.needs import needed_files
from meseta.errors import StorageError
from meseta.machine.remote import WAITS_S, RemotePath
from meseta.spec import MesetaError

_LOCK = re.compile(r"\.writing-([0-9]{6})")


class ObjectStore:
    """Checkpoints below a URL. Its methods raise MesetaError, naming it, where it cannot be reached, or refuses."""

    writes_near = True

    def __init__(self, parent: RemotePath) -> None:
        self.parent = parent
        self._known: set[str] | None = None
        """Names of checkpoints that this store found when it was opened or has written; `None` if it was not opened."""
        self._left_behind: set[bytes] | None = None
        """Contents of locks that nobody holds: those found when this store was opened, and its own."""
        self._lock: RemotePath | None = None
        self._token = b""
        """Content of `_lock`."""

    def open(self) -> None:
        """Register what is there now. From then on a new checkpoint or lock of another process is an error."""
        self._left_behind = {self._content(lock) for lock in self._locks()}
        self._known = {path.name for path in (*self.named(), *self.passed_over())}

    def growing(self, step: int) -> RemotePath:
        """Where a checkpoint grows before its commit: in its place, unseen without a manifest."""
        return self.parent / checkpoint_name(step)

    def begin(self, step: int, folders: Sequence[str]) -> RemotePath:
        """Clean up after killed runs; raises MesetaError where a checkpoint of this step is there."""
        growing = self.growing(step)
        if has_file(growing, PASSED_OVER):
            self.discard(growing)
        if has_file(growing, MANIFEST_PATH):
            raise taken(growing)
        try:
            self.collect()
        except StorageError:
            if growing.files():  # they would be taken for another run's
                raise
        return growing

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager that holds the lock. Raises MesetaError if another process holds it, or has saved here since
        `open`."""
        former = self._acquire()
        try:
            for lock in former:
                lock.delete()
            check_known(self.named() if self._known is not None else (), self._known)
            yield
        finally:
            own, self._lock = self._lock, None
            with contextlib.suppress(MesetaError):  # a lock that stays is known to be left behind
                if own is not None and self._content(own) == self._token:
                    own.delete()

    def _acquire(self) -> list[RemotePath]:
        """Create a lock; returns those that are left behind. Waits a few seconds for a holder that may be refused."""
        for wait_s in (*WAITS_S, None):
            locks = self._locks()
            number = max((int(lock.name[-6:]) for lock in locks), default=0) + 1
            lock = self.parent / f".writing-{number:06d}"
            held = [other for other in locks if not self._is_left_behind(other)]
            if not held and self._create(lock):
                self._lock = lock
                return locks
            if wait_s is None:
                raise taken((held or [lock])[0])
            time.sleep(wait_s)
        raise AssertionError

    def _is_left_behind(self, lock: RemotePath) -> bool:
        return self._left_behind is None or self._content(lock) in self._left_behind

    def _create(self, lock: RemotePath) -> bool:
        """Whether this process has created the lock, not another one."""
        self._token = secrets.token_hex(16).encode()
        try:
            lock.create(self._token)
        except FileExistsError:
            return False
        if self._left_behind is not None:
            self._left_behind.add(self._token)
        return True

    def _locks(self) -> list[RemotePath]:
        """By rising number."""
        names = [name for name, is_folder in self.parent.names().items() if not is_folder and _LOCK.fullmatch(name)]
        return [self.parent / name for name in sorted(names)]

    @staticmethod
    def _content(lock: RemotePath) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return lock.read(0, 64)
        return b""

    def _check_held(self) -> None:
        """Raise MesetaError if another process has taken the lock from this one."""
        if self._lock is not None and (self._locks() != [self._lock] or self._content(self._lock) != self._token):
            raise taken(self._lock)

    def check_shared(self, growing: RemotePath) -> None:
        """Every rank writes to the same URL."""

    def files_of(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, or of what is left of one, by path inside it."""
        return (self.parent / folder).stamped_files()

    def older_file(self, folder: str, inner: str) -> AbstractContextManager[RemotePath]:
        """Where to write a file of an existing checkpoint: in its place, once a former one is deleted."""
        path = self.parent / folder / inner
        path.delete()
        return nullcontext(path)

    def commit(self, growing: RemotePath, manifest: Mapping[str, Any], rate: WriteRate | None = None) -> RemotePath:
        """Write the manifest of a checkpoint whose files are there, if there is none: from then on it is one."""
        there = growing.files()
        for entry in own_entries(manifest):
            if there.get(entry["path"]) != entry["num_bytes"]:
                raise taken(growing / entry["path"])
        self._check_held()  # after the listing, which therefore shows this process's files
        write_manifest(growing, manifest, rate)
        try:
            self._check_held()
        except MesetaError:  # whoever took the lock may be deleting the files
            (growing / MANIFEST_PATH).delete()
            raise
        if self._known is not None:
            self._known.add(growing.name)
        return growing

    def give_up(self, growing: RemotePath) -> None:
        """Leave what has not become a checkpoint to the next save: the store may be out of reach, or another run's."""

    def delete(self, doomed: Sequence[RemotePath]) -> None:
        """Delete checkpoints, their manifests first, but the files that others need. Nothing is deleted before all is
        read that this depends on."""
        with nullcontext() if self._lock is not None else self.alone():
            unneeded = self._unneeded(doomed)
            for path in doomed:
                (path / MANIFEST_PATH).delete()
            self._remove(unneeded)

    def discard(self, path: RemotePath) -> None:
        """Delete a checkpoint, its manifest first, whoever may need its files."""
        (path / MANIFEST_PATH).delete()
        path.delete(below=True)

    def remove_all(self) -> None:
        """Delete all checkpoints, and what killed runs left of others."""
        for path in self._folders():
            self.discard(path)
        for lock in self._locks():
            lock.delete()
        self.parent.drop_uploads()

    def named(self) -> list[RemotePath]:
        """Folders named as checkpoints that have a manifest, by rising step; none that was passed over."""
        listed = {path: read(path, path, path.names) for path in self._folders()}
        return [path for path, names in listed.items() if MANIFEST_PATH in names and PASSED_OVER not in names]

    def pass_over(self, path: RemotePath, why: str) -> None:
        """Let a damaged checkpoint be none any more, with all that it has, until a new one takes its place."""
        (path / PASSED_OVER).create(f"{why}\n".encode())

    def passed_over(self) -> list[RemotePath]:
        """Those, by rising step."""
        return [path for path in self._folders() if has_file(path, PASSED_OVER)]

    def strangers(self) -> list[RemotePath]:
        """None are told of: a store may hold anything beside."""
        return []

    def collect(self) -> None:
        """Delete what killed runs left: unfinished uploads, and files of checkpoints that no manifest names. Nothing is
        deleted of a checkpoint that is damaged, and no file where one is of a later version."""
        self._remove(self._unneeded())

    def _unneeded(self, doomed: Collection[RemotePath] = ()) -> dict[RemotePath, set[RemotePath] | None]:
        """Files that no manifest but those of `doomed` names, by folder; `None` for a folder with no other file."""
        paths = self._folders()
        files = {path: {path / inner for inner in read(path, path, path.files)} for path in paths}
        paths = [path for path in paths if path / PASSED_OVER not in files[path]]  # others are left alone
        checkpoints = [path for path in paths if path / MANIFEST_PATH in files[path] and path not in doomed]
        needed = needed_files(checkpoints)
        if needed is None:
            return {}
        unneeded: dict[RemotePath, set[RemotePath] | None] = {}
        for path in paths:
            if path in checkpoints and path / DENSE_PATH not in needed:
                continue  # damaged
            is_whole = files[path].isdisjoint(needed)
            unneeded[path] = None if is_whole else files[path] - needed - {path / MANIFEST_PATH}
        return unneeded

    def _remove(self, unneeded: Mapping[RemotePath, Collection[RemotePath] | None]) -> None:
        self.parent.drop_uploads()
        for path, files in unneeded.items():
            if files is None:
                path.delete(below=True)
            for file in files or ():
                file.delete()

    def _folders(self) -> list[RemotePath]:
        folders = read(None, self.parent, self.parent.folders)
        names = [name for name in folders if (match := NAME.fullmatch(name)) and not match["old"]]
        return sorted((self.parent / name for name in names), key=named_step)
