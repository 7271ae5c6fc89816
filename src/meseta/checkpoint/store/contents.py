"""Cached view of the files in a store and of the manifests that name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.block import group_files_by_block, read_block, read_rows, read_tensors
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.paths import is_block_path, split_path
from meseta.checkpoint.manifest import MANIFEST_PATH, PREFETCHED, file_entries, get_run_id, read_manifest
from meseta.checkpoint.store.store import CheckpointStore
from meseta.system.files import is_link
from meseta.system.remote import Location

FileKey = tuple[int, str]
"""Size in bytes and checksum of a file, as stated in a manifest."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """Part of a manifest that identifies a checkpoint and its files."""

    name: str
    """Folder name of the checkpoint, such as 'step-000000500'."""
    step: int
    run_id: str | None
    """Id of the run that saved the checkpoint. `None` if an early version without run ids wrote it."""
    content_digest: str
    """Checksum of the model, or the digest of its chain for a delta."""
    manifest_checksum: str
    files: Mapping[str, FileKey]
    """Files by path below the store, such as 'step-000000500/dense.safetensors', including files of older
    checkpoints."""

    @staticmethod
    def from_manifest(name: str, manifest: Mapping[str, Any]) -> CheckpointFiles:
        """Create it from a checked manifest."""
        return CheckpointFiles(
            name=name,
            step=manifest["step"],
            run_id=get_run_id(manifest),
            content_digest=digest.content_digest(manifest),
            manifest_checksum=manifest["manifest_checksum"],
            files={path_in_store(name, entry): file_key(entry) for entry in file_entries(manifest)},
        )

    def conflicts_with(self, other: CheckpointFiles) -> bool:
        """Whether both checkpoints cannot be in one store.

        They conflict if a common file differs in content, or if this one needs a file in the folder of `other` that
        `other` does not write.
        """
        if self.name == other.name:
            return False
        for path, key in self.files.items():
            needs = path in other.files or path.startswith(f"{other.name}/")
            if needs and other.files.get(path) != key:
                return True
        return False


class StoreContents:
    """Contents of a store at the last `refresh`."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.checkpoints: dict[str, CheckpointFiles] = {}
        """Checkpoints with an intact manifest by name, oldest first."""
        self.damaged: dict[str, DamagedCheckpoint] = {}
        """Errors of the checkpoints whose manifest is missing or damaged, by name."""
        self._stamps: dict[str, str] = {}
        self._listings: dict[str, Mapping[str, tuple[int, str]]] = {}

    def refresh(self) -> None:
        """List the store again, and read changed manifests. Raises MesetaError if one is of another version."""
        former, self.checkpoints, self.damaged, self._listings = self.checkpoints, {}, {}, {}
        for path in checkpoints_without_links(self.store):
            stamp = self._stamp(path.name)
            if path.name in former and stamp and stamp == self._stamps[path.name]:
                self.checkpoints[path.name] = former[path.name]
                continue
            try:
                self.checkpoints[path.name] = CheckpointFiles.from_manifest(path.name, read_manifest(path))
                self._stamps[path.name] = stamp
            except DamagedCheckpoint as problem:
                self.damaged[path.name] = problem

    def invalidate(self, names: Iterable[str]) -> None:
        """Remove checkpoints that were deleted, and list files again when needed."""
        self._listings = {}
        for name in names:
            self.checkpoints.pop(name, None)
            self.damaged.pop(name, None)

    def add(self, checkpoint: CheckpointFiles) -> None:
        """Add a checkpoint that this process has written."""
        self.invalidate([checkpoint.name])
        # If listing its files fails, the next refresh reads the manifest.
        self._stamps[checkpoint.name] = self._stamp(checkpoint.name)
        self.checkpoints[checkpoint.name] = checkpoint

    def has_file(self, path: str, key: FileKey) -> bool:
        """Whether a file has this size, and an intact manifest states this checksum for it."""
        return self.num_bytes(path) == key[0] and any(c.files.get(path) == key for c in self.checkpoints.values())

    def num_bytes(self, path: str) -> int | None:
        """Return the size of a file, or `None` if it is missing."""
        folder, _, inner = path.partition("/")
        return self._list_folder(folder).get(inner, (None, ""))[0]

    def incomplete_files(self, checkpoint: CheckpointFiles) -> list[str]:
        """Return the paths of the checkpoint's files that are missing or have another size."""
        return [path for path, key in checkpoint.files.items() if self.num_bytes(path) != key[0]]

    def _stamp(self, name: str) -> str:
        return self._list_folder(name).get(MANIFEST_PATH, (0, ""))[1]

    def _list_folder(self, folder: str) -> Mapping[str, tuple[int, str]]:
        if folder not in self._listings:
            self._listings[folder] = self.store.list_files(folder)
        return self._listings[folder]


def checkpoints_without_links(store: CheckpointStore) -> Iterator[Location]:
    """Yield the locations that may be checkpoints, oldest first, without links."""
    for path in store.list_candidates():
        if path.name.startswith("step-") and not (isinstance(path, Path) and is_link(path)):
            yield path


def path_in_store(name: str, entry: Mapping[str, Any]) -> str:
    """Return the path below the store of a file that the manifest of checkpoint `name` names."""
    folder, inner = split_path(entry["path"])
    return f"{folder or name}/{inner}"


def file_key(entry: Mapping[str, Any]) -> FileKey:
    """Return (bytes, checksum) of a manifest entry."""
    return entry["num_bytes"], entry["checksum"]


def check_content(root: Location, manifest: Mapping[str, Any], files: Collection[str]) -> None:
    """Verify `files`, paths below the store. Raises DamagedCheckpoint if a checksum differs from the manifest."""
    for key in ("dense", PREFETCHED):
        if key in manifest and path_in_store(root.name, manifest[key]) in files:
            read_tensors(root, manifest[key])
    for table in manifest["tables"].values():
        schema = BlockSchema.from_dict(table)
        for block in group_files_by_block(table):
            for entry in block:
                if path_in_store(root.name, entry) not in files:
                    continue
                if is_block_path(entry["path"]):
                    read_block(root, schema, entry)
                else:
                    read_rows(root, schema, entry, block[0]["num_rows"])
