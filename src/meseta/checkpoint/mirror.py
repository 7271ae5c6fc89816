"""Copies of a run's checkpoints at a URL of fsspec: s3://, gs://, hdfs://, memory://, file:// and others.

Object stores have no rename. There the manifest, written last and removed first, is the commit: a checkpoint without
one, or with half of one, is none.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from meseta.checkpoint import digest
from meseta.checkpoint.broken import check_size
from meseta.checkpoint.directory import NAME, begin, checkpoint_path, commit, temporary_path
from meseta.checkpoint.manifest import FORMAT, MANIFEST_PATH, read_manifest
from meseta.spec import MesetaError
from meseta.spec.urls import remote_errors


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

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Manifests of the checkpoints there, by name, the oldest first."""
        found = {}
        with self._told():
            self._system.invalidate_cache()
            listed = self._system.ls(self._root, detail=False) if self._system.exists(self._root) else []
            for name in (str(path).rstrip("/").rpartition("/")[2] for path in listed):
                if (match := NAME.fullmatch(name)) and not match["old"]:
                    manifest = self._manifest(name)
                    if manifest is not None:
                        found[int(match["step"])] = (name, manifest)
        return dict(found[step] for step in sorted(found))

    def put(self, path: Path) -> None:
        """Copy a checkpoint there, unless it is there already; a former one of its step gives way first."""
        manifest = read_manifest(path)
        with self._told():
            former = self._manifest(path.name)
            if former == manifest:
                return
            self._remove_manifest(path.name)
            for inner in _files(manifest):
                target = f"{self._root}/{path.name}/{inner}"
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(path / inner), target)
            self._system.put_file(str(path / MANIFEST_PATH), f"{self._root}/{path.name}/{MANIFEST_PATH}")

    def keep(self, names: Collection[str]) -> None:
        """Delete the checkpoints there that are not among `names`."""
        for name in self.manifests():
            if name not in names:
                with self._told():
                    self._remove_manifest(name)
                    self._system.rm(f"{self._root}/{name}", recursive=True)

    def get(self, parent: Path, name: str | None = None) -> Path:
        """Fetch a checkpoint, None: the newest one, into the folder `parent`, where it appears by one rename.

        Raises MesetaError also where there is none, and for files of other sizes than the manifest says.
        """
        manifests = self.manifests()
        name = next(reversed(manifests), None) if name is None else name
        if name not in manifests:
            raise MesetaError(f"checkpoint {self.url!r} holds no checkpoint{f' {name}' if name else ''}; check the URL")
        manifest = manifests[name]
        files = _files(manifest)
        folders = sorted({inner.rpartition("/")[0] for inner in files} - {""})
        try:
            temporary = begin(parent, manifest["step"], folders)
            temporary.mkdir(parents=True, exist_ok=True)
            with self._told():
                for inner in (*files, MANIFEST_PATH):
                    self._system.get_file(f"{self._root}/{name}/{inner}", str(temporary / inner))
            for inner, num_bytes in files.items():
                check_size(temporary / inner, num_bytes)
            read_manifest(temporary)
            commit(temporary_path(parent, manifest["step"]))
        except OSError as error:
            raise MesetaError(f"checkpoint {str(parent)!r}: {error.strerror or error}; make room there") from None
        return checkpoint_path(parent, manifest["step"])

    def _manifest(self, name: str) -> dict[str, Any] | None:
        """None where there is none, or half of one, or another format."""
        path = f"{self._root}/{name}/{MANIFEST_PATH}"
        if not self._system.exists(path):
            return None
        try:
            manifest = json.loads(self._system.cat_file(path))
            whole = manifest["format"] == FORMAT and manifest["manifest_checksum"] == digest.of_manifest(manifest)
        except (ValueError, KeyError, TypeError):
            return None
        return manifest if whole else None

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
    return sum(_files(manifest).values())


def _files(manifest: dict[str, Any]) -> dict[str, int]:
    """Bytes of every file but the manifest, by path."""
    blocks = [block for table in manifest["tables"].values() for block in table["blocks"]]
    return {entry["path"]: entry["num_bytes"] for entry in (manifest["dense"], *blocks)}
