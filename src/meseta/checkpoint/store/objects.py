"""Checkpoints at a URL, where nothing can be renamed: each appears with its manifest, which is written last.

All files of a checkpoint are made only where there are none, so that two runs that write to one place meet: the second
is refused. Deleting takes the manifest first. What a killed run leaves is a folder without a manifest, a file that no
manifest names, or parts of an upload; the next save collects it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meseta.checkpoint.failures import has_file, read, taken
from meseta.checkpoint.files.paths import NAME
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.files.tensors import DENSE_PATH
from meseta.checkpoint.manifest import MANIFEST_PATH, own_entries, write_manifest
from meseta.checkpoint.store.names import PASSED_OVER, checkpoint_name, named_step
from meseta.checkpoint.store.needs import needed_files
from meseta.errors import StorageError
from meseta.machine.remote import RemotePath


class ObjectStore:
    """Checkpoints below a URL. Its methods raise MesetaError, naming it, where it cannot be reached, or refuses."""

    writes_near = True

    def __init__(self, parent: RemotePath) -> None:
        self.parent = parent

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

    def alone(self) -> AbstractContextManager[None]:
        """Files are made only where there are none: of two who write a checkpoint, the second is refused."""
        return nullcontext()

    def check_shared(self, growing: RemotePath) -> None:
        """Every rank writes to the same URL."""

    def files_of(self, folder: str) -> dict[str, int]:
        """Bytes of the files of a checkpoint, or of what is left of one, by path inside it."""
        return (self.parent / folder).files()

    def older_file(self, folder: str, inner: str) -> AbstractContextManager[RemotePath]:
        """Where to write a file of an older checkpoint, which one that grows needs: in its place."""
        return nullcontext(self.parent / folder / inner)

    def commit(self, growing: RemotePath, manifest: Mapping[str, Any], rate: WriteRate | None = None) -> RemotePath:
        """Write the manifest of a checkpoint whose files are there, if there is none: from then on it is one."""
        there = growing.files()
        for entry in own_entries(manifest):
            if there.get(entry["path"]) != entry["num_bytes"]:
                raise taken(growing / entry["path"])
        write_manifest(growing, manifest, rate)
        return growing

    def give_up(self, growing: RemotePath) -> None:
        """Leave what has not become a checkpoint to the next save: the store may be out of reach, or another run's."""

    def delete(self, doomed: Sequence[RemotePath]) -> None:
        """Delete checkpoints, their manifests first, but the files that others need. Nothing is deleted before all is
        read that this depends on."""
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
        self.parent.drop_uploads()

    def named(self) -> list[RemotePath]:
        """Folders named as checkpoints that have a manifest, by rising step; none that was passed over."""
        checkpoints = [path for path in self._folders() if has_file(path, MANIFEST_PATH)]
        return [path for path in checkpoints if not has_file(path, PASSED_OVER)]

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
