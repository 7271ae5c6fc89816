"""Copies of a run's checkpoints in another store, at a URL of fsspec: s3://, gs://, hdfs://, file:// and others.

What lies there may be a stranger's: names, sizes and kinds of files are checked before the first byte is fetched,
written or deleted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import file_of, malformed, read_error
from meseta.checkpoint.files.paths import NAME, split_path
from meseta.checkpoint.files.raw import copy_whole
from meseta.checkpoint.manifest import (
    MANIFEST_PATH,
    check_manifest,
    entries_of,
    own_entries,
    parse_manifest,
    read_manifest,
)
from meseta.checkpoint.store.names import checkpoint_name
from meseta.checkpoint.store.store import CheckpointStore, store_at
from meseta.machine.files import is_read_failure
from meseta.machine.remote import Location, RemotePath, location_exists, read_document, remote_errors
from meseta.machine.waits.activity import activity
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """One name at a mirror that has a whole manifest."""

    name: str
    """For example 'step-000000500'."""
    manifest: dict[str, Any] | None
    """None where it says what no checkpoint says."""
    problem: str
    """What that is; else empty."""


class Mirror:
    """Checkpoints below a URL; used by one process at a time. All methods raise MesetaError, naming the URL, where the
    file system cannot be reached, is not installed, or refuses."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = store_at(self.url)
        if isinstance(self._store.parent, RemotePath):
            self._store.parent.check_installed()

    def names(self) -> list[str]:
        """What may be a checkpoint there, by its name alone, the oldest first; no links."""
        with self._told():
            return [path.name for path in self._store.named() if _is_own(path)]

    def checkpoints(self, *, newest_first: bool = False) -> Iterator[Mirrored]:
        """The checkpoints there; of their manifests, one at a time is in memory."""
        names = self.names()
        for name in reversed(names) if newest_first else names:
            if (found := self._find(name)) is not None:
                yield found

    def put(self, path: Location) -> None:
        """Copy a checkpoint there, unless it is there already, with those files of older ones that it needs and that
        are not there; a former one of its step gives way first."""
        manifest = read_manifest(path)
        former = self._store.parent / path.name
        with self._told():
            if location_exists(former / MANIFEST_PATH):
                found = self._find(path.name)
                if found is not None and found.manifest == manifest:
                    return
                self._store.discard(former)
            _copy(path, manifest, self._store)

    def keep(self, names: Collection[str]) -> None:
        """Delete the checkpoints there that are not among `names`, but the files that those need; what is none, or none
        of ours, stays."""
        doomed = [found.name for found in self.checkpoints() if found.manifest and found.name not in names]
        if doomed:
            with self._told():
                self._store.delete([self._store.parent / name for name in doomed])

    def get(self, parent: Location, name: str | None = None) -> Location:
        """Fetch a checkpoint, None: the newest one, into the store `parent`, where it appears whole.

        Raises MesetaError also where there is none, where its manifest says what no checkpoint says, for files of other
        sizes than it says, and where they do not fit on the disk.
        """
        found = next(self.checkpoints(newest_first=True), None) if name is None else self._find(name)
        if found is None:
            raise MesetaError(f"checkpoint {self.url!r} holds no checkpoint{f' {name}' if name else ''}; check the URL")
        if found.manifest is None:
            raise MesetaError(found.problem)
        num_bytes, free_bytes = sum(entry["num_bytes"] for entry in entries_of(found.manifest)), _free_bytes(parent)
        if num_bytes > free_bytes:
            raise MesetaError(
                f"checkpoint '{self.url}/{found.name}' has {num_bytes:,} bytes, and {str(parent)!r} has {free_bytes:,} "
                "free; make room there"
            )
        try:
            return _copy(self._store.parent / found.name, found.manifest, store_at(parent))
        except OSError as error:
            raise MesetaError(f"checkpoint {str(parent)!r}: {error.strerror or error}; make room there") from None

    def _find(self, name: str) -> Mirrored | None:
        """None where there is none, or half of one, or another format. Raises StorageError if a read fails."""
        path = self._store.parent / name
        where = f"checkpoint file {str(path / MANIFEST_PATH)!r}"
        try:
            content = read_document(path, MANIFEST_PATH)
        except FileNotFoundError:
            return None
        except OSError as error:
            if is_read_failure(error):  # nobody knows whether there is one
                raise read_error(path / MANIFEST_PATH, error) from None
            return Mirrored(name=name, manifest=None, problem=str(malformed(where, str(error.strerror))))
        try:
            manifest = parse_manifest(where, content)
        except MesetaError:
            return None
        try:
            check_manifest(where, manifest)
            if checkpoint_name(manifest["step"]) != name:
                raise malformed(where, f"it is of step {manifest['step']}")
        except MesetaError as error:
            return Mirrored(name=name, manifest=None, problem=str(error))
        return Mirrored(name=name, manifest=manifest, problem="")

    @contextmanager
    def _told(self) -> Iterator[None]:
        with activity("using the mirror"), remote_errors("checkpoint", self.url, "used"):
            yield


def _is_own(path: Location) -> bool:
    """Whether a name is that of a checkpoint, and no link to one elsewhere."""
    return path.name.startswith("step-") and not (isinstance(path, Path) and path.is_symlink())


def _copy(source: Location, manifest: Mapping[str, Any], store: CheckpointStore) -> Location:
    """Copy a checkpoint into a store, where it appears whole, and of older ones what it needs and is not there; returns
    where it lies. Raises OSError of a directory."""
    folders = {entry["path"].rpartition("/")[0] for entry in own_entries(manifest)} - {""}
    growing: Location = store.begin(manifest["step"], sorted(folders))
    there: dict[str, dict[str, int]] = {}
    try:
        for entry in entries_of(manifest):
            folder, inner = split_path(entry["path"])
            if folder is None:
                copy_whole(file_of(source, entry), growing / inner, entry["num_bytes"])
                continue
            if folder not in there:
                there[folder] = store.files_of(folder)
            if there[folder].get(inner) != entry["num_bytes"]:
                with store.older_file(folder, inner) as target:
                    copy_whole(file_of(source, entry), target, entry["num_bytes"])
        path: Location = store.commit(growing, manifest)
    except BaseException:
        store.give_up(growing)
        raise
    return path


def fetch(url: str, folder: Location) -> Location:
    """Fetch the checkpoint at a URL, or the newest one below it, into `folder`; raises what `Mirror.get` raises."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return Mirror(parent).get(folder, name) if NAME.fullmatch(name) else Mirror(url).get(folder)


def _free_bytes(folder: Location) -> float:
    """On the disk of a folder that may still have to be made; a URL has no end."""
    if isinstance(folder, RemotePath):
        return math.inf
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
