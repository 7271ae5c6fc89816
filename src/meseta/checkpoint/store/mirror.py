"""Copies of a run's checkpoints at a URL of fsspec: s3://, gs://, hdfs://, memory://, file:// and others.

Object stores have no rename. There the manifest, written last and removed first, is the commit: a checkpoint without
one, or with half of one, is none. What lies there may be a stranger's: names, sizes and kinds of files are checked
before the first byte is fetched, written or deleted.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import file_of, malformed
from meseta.checkpoint.manifest import MANIFEST_PATH, check_manifest, entries_of, parse_manifest, read_manifest
from meseta.checkpoint.store.directory import NAME, begin, checkpoint_path, commit, discard, temporary_path
from meseta.machine.files import DOCUMENT_BYTES, inside, too_long
from meseta.machine.remote import remote_errors
from meseta.spec import MesetaError

_PART_BYTES = 4 << 20
"""What is fetched at a time."""


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """One name at a mirror that has a whole manifest."""

    name: str
    """For example 'step-000000500'."""
    manifest: dict[str, Any] | None
    """None where it says what no checkpoint says."""
    problem: str
    """What that is; else empty."""
    content: bytes
    """The manifest as it was read."""


class Mirror:
    """Checkpoints below a URL; used by one process at a time. All methods raise MesetaError, naming the URL, where the
    file system cannot be reached, is not installed, or refuses."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._told():
            import fsspec

            system, root = fsspec.core.url_to_fs(self.url)
        self._system: Any = system
        self._root = str(root).rstrip("/")

    def names(self) -> list[str]:
        """What may be a checkpoint there, by its name alone, the oldest first; no links."""
        found = {}
        with self._told():
            self._system.invalidate_cache()
            listed = self._system.ls(self._root, detail=True) if self._system.exists(self._root) else []
            for entry in listed:
                name = str(entry["name"]).rstrip("/").rpartition("/")[2]
                if (match := NAME.fullmatch(name)) and not match["old"] and not entry.get("islink"):
                    found[int(match["step"])] = name
        return [found[step] for step in sorted(found)]

    def checkpoints(self, *, newest_first: bool = False) -> Iterator[Mirrored]:
        """The checkpoints there; of their manifests, one at a time is in memory."""
        names = self.names()
        for name in reversed(names) if newest_first else names:
            if (found := self._find(name)) is not None:
                yield found

    def put(self, path: Path) -> None:
        """Copy a checkpoint there, unless it is there already; a former one of its step gives way first."""
        manifest = read_manifest(path)
        files = [file_of(path, entry) for entry in entries_of(manifest)]
        former = self._find(path.name)
        if former is not None and former.manifest == manifest:
            return
        targets = {f"{self._root}/{path.name}/{file.relative_to(path).as_posix()}": file for file in files}
        targets[f"{self._root}/{path.name}/{MANIFEST_PATH}"] = path / MANIFEST_PATH
        with self._told():
            for target in targets:
                self._check_target(target)
            self._remove_manifest(path.name)
            for target, file in targets.items():
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(file), target)

    def keep(self, names: Collection[str]) -> None:
        """Delete the checkpoints there that are not among `names`; what is none, or none of ours, stays."""
        doomed = [found.name for found in self.checkpoints() if found.manifest and found.name not in names]
        for name in doomed:
            with self._told():
                self._remove_manifest(name)
                self._system.rm(f"{self._root}/{name}", recursive=True)

    def get(self, parent: Path, name: str | None = None) -> Path:
        """Fetch a checkpoint, None: the newest one, into the folder `parent`, where it appears by one rename.

        Raises MesetaError also where there is none, where its manifest says what no checkpoint says, for files of other
        sizes than it says, and where they do not fit on the disk.
        """
        found = next(self.checkpoints(newest_first=True), None) if name is None else self._find(name)
        if found is None:
            raise MesetaError(f"checkpoint {self.url!r} holds no checkpoint{f' {name}' if name else ''}; check the URL")
        if found.manifest is None:
            raise MesetaError(found.problem)
        step = found.manifest["step"]
        temporary = temporary_path(parent, step)
        try:
            self._fetch(parent, found, found.manifest)
            commit(temporary)
        except OSError as error:
            raise MesetaError(f"checkpoint {str(parent)!r}: {error.strerror or error}; make room there") from None
        finally:
            with suppress(OSError):
                discard(temporary)
        return checkpoint_path(parent, step)

    def _fetch(self, parent: Path, found: Mirrored, manifest: dict[str, Any]) -> None:
        """All files of a checkpoint into its temporary folder. Raises OSError of this side, MesetaError of that one."""
        num_bytes, free_bytes = mirrored_bytes(manifest), _free_bytes(parent)
        if num_bytes > free_bytes:
            raise MesetaError(
                f"checkpoint '{self.url}/{found.name}' has {num_bytes:,} bytes, and {str(parent)!r} has {free_bytes:,} "
                "free; make room there"
            )
        folders = {entry["path"].rpartition("/")[0] for entry in entries_of(manifest)} - {""}
        temporary = begin(parent, manifest["step"], sorted(folders))
        for entry in entries_of(manifest):
            source = f"{found.name}/{entry['path']}"
            with (temporary / entry["path"]).open("xb") as file:
                fetched = sum(file.write(part) for part in self._parts(source, entry["num_bytes"] + 1))
            if fetched != entry["num_bytes"]:
                has = f"has {fetched}" if fetched < entry["num_bytes"] else "goes on"
                raise MesetaError(
                    f"checkpoint file '{self.url}/{source}' must have {entry['num_bytes']} bytes, but {has}; "
                    "copy the checkpoint again, or use an older one"
                )
        (temporary / MANIFEST_PATH).write_bytes(found.content)

    def _find(self, name: str) -> Mirrored | None:
        """None where there is none, or half of one, or another format."""
        source = f"{name}/{MANIFEST_PATH}"
        with self._told():
            if not self._system.exists(f"{self._root}/{source}"):
                return None
        where = f"checkpoint file '{self.url}/{source}'"
        content = b""
        try:
            content = b"".join(self._parts(source, DOCUMENT_BYTES + 1))
            if len(content) > DOCUMENT_BYTES:
                raise malformed(where, str(too_long(source, DOCUMENT_BYTES).strerror))
        except MesetaError as error:
            return Mirrored(name=name, manifest=None, problem=str(error), content=b"")
        try:
            manifest = parse_manifest(where, content)
        except MesetaError:
            return None
        try:
            check_manifest(where, manifest)
            if checkpoint_path(Path(), manifest["step"]).name != name:
                raise malformed(where, f"it is of step {manifest['step']}")
        except MesetaError as error:
            return Mirrored(name=name, manifest=None, problem=str(error), content=b"")
        return Mirrored(name=name, manifest=manifest, problem="", content=content)

    def _parts(self, source: str, most_bytes: int) -> Iterator[bytes]:
        """At most so much of a file there. Raises MesetaError where there is no such file, or no regular one."""
        with self._told():
            place = f"{self._root}/{source}"
            if getattr(self._system, "local_file", False):
                name, _, inner = source.partition("/")
                inside(f"{self._root}/{name}", inner)
            elif self._system.info(place).get("type") == "directory":
                raise IsADirectoryError(f"{source} is a directory")
            with self._system.open(place, "rb") as file:
                while most_bytes and (part := file.read(min(most_bytes, _PART_BYTES))):
                    yield part
                    most_bytes -= len(part)

    def _check_target(self, place: str) -> None:
        """Raise OSError where, on this machine, a link or something that is no regular file stands in the way."""
        if getattr(self._system, "local_file", False):
            linked = os.path.realpath(place) != os.path.realpath(self._root) + place.removeprefix(self._root)
            if linked or (os.path.exists(place) and not os.path.isfile(place)):
                raise OSError(errno.EEXIST, "a link, or what is no regular file, stands there", place)

    def _remove_manifest(self, name: str) -> None:
        path = f"{self._root}/{name}/{MANIFEST_PATH}"
        if self._system.exists(path):
            self._system.rm_file(path)

    def _told(self) -> AbstractContextManager[None]:
        return remote_errors("checkpoint", self.url, "used")


def fetch(url: str, folder: Path) -> Path:
    """Fetch the checkpoint at a URL, or the newest one below it, into `folder`; raises what `Mirror.get` raises."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return Mirror(parent).get(folder, name) if NAME.fullmatch(name) else Mirror(url).get(folder)


def mirrored_bytes(manifest: dict[str, Any]) -> int:
    """Of all files but the manifest."""
    return sum(entry["num_bytes"] for entry in entries_of(manifest))


def _free_bytes(folder: Path) -> int:
    """On the disk of a folder that may still have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
