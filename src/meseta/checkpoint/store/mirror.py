"""Mirrors: copies of a run's checkpoints in another store, such as s3://, gs://, hdfs:// or file://."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import DamagedCheckpoint, locate_file, malformed_manifest_error, read_error
from meseta.checkpoint.files.direct_io import copy_file
from meseta.checkpoint.files.paths import CHECKPOINT_NAME_PATTERN, checkpoint_name, split_path
from meseta.checkpoint.manifest import (
    MANIFEST_PATH,
    check_manifest,
    file_entries,
    own_file_entries,
    parse_manifest,
    read_manifest,
)
from meseta.checkpoint.store.contents import (
    CheckpointFiles,
    StoreContents,
    check_content,
    checkpoints_without_links,
    file_key,
    path_in_store,
)
from meseta.checkpoint.store.readback import ReadbackQueue
from meseta.checkpoint.store.store import make_store
from meseta.spec import MesetaError
from meseta.system.files import is_read_failure
from meseta.system.remote import Location, RemotePath, read_inner_file, wrap_remote_errors
from meseta.system.waits import track_activity


# Files of a mirror are untrusted input. Names, sizes and types of files are checked before a file is read, written or
# deleted. An existing file is used only if a manifest at the mirror states its expected checksum.
@dataclass(frozen=True, kw_only=True)
class MirrorEntry:
    """Checkpoint at a mirror that has a parsable manifest."""

    name: str
    """Folder name of the checkpoint, such as 'step-000000500'."""
    manifest: dict[str, Any] | None
    """Checked manifest. `None` if it is invalid."""
    problem: str
    """Reason why the manifest is invalid, or an empty string."""


class Mirror:
    """Mirror at a URL, for one process at a time. All methods raise MesetaError if the file system is unreachable, not
    installed, or rejects a request."""

    def __init__(self, url: str, readback_file: Path | None = None) -> None:
        """Create a mirror. `readback_file`, or memory if `None`, stores the order in which files are read back."""
        self.url = url.rstrip("/")
        self._store = make_store(self.url)
        if isinstance(self._store.parent, RemotePath):
            self._store.parent.check_installed()
        self._target = StoreContents(self._store)
        # Contents of the store from which `update` copies.
        self._source: StoreContents | None = None
        self._readback = ReadbackQueue(readback_file)

    def names(self) -> list[str]:
        """Return the folder names at the mirror that may be checkpoints, oldest first, without links."""
        with self._wrap_errors():
            return [path.name for path in checkpoints_without_links(self._store)]

    def checkpoints(self, *, newest_first: bool = False) -> Iterator[MirrorEntry]:
        """Yield the checkpoints at the mirror. Only one manifest is in memory at a time."""
        names = self.names()
        for name in reversed(names) if newest_first else names:
            if (entry := self._read_entry(name)) is not None:
                yield entry

    def check_owner(self, run_id: str | None, folder: Location) -> None:
        """Raise MesetaError if the mirror has checkpoints of another run than the one that saves in `folder`.

        Checkpoints of versions without run ids are accepted if the newest common step has the same content in both
        places.
        """
        with self._wrap_errors():
            self._target.refresh()
            self._check_owner(run_id, self._refresh_source(folder))

    def put(self, path: Location) -> None:
        """Copy a checkpoint and the older files that it needs to the mirror, except files that the mirror has already.

        Replaces a former checkpoint of the step. Deletes checkpoints that need other content of the same files, because
        they cannot be of the same run. Raises DamagedCheckpoint if the checkpoint is damaged.
        """
        with self._wrap_errors(), self._store.lock():
            self._target.refresh()
            self._put(path.name, self._refresh_source(path.parent), is_new=False)

    def update(self, folder: Location, names: Collection[str], run_id: str | None) -> list[str]:
        """Make the mirror hold the intact checkpoints of `folder`, and no others of this run. Return warnings.

        Deletes checkpoints that are not in `names`, but keeps files that others need. Quarantines damaged checkpoints
        that `folder` cannot replace. Then reads back as many bytes as were sent, and sends damaged files again.

        Raises the errors of `check_owner`, and DamagedCheckpoint if a damaged file of `folder` is missing at the
        mirror.
        """
        with self._wrap_errors(), self._store.lock():
            here = self._refresh_source(folder)
            self._target.refresh()
            self._check_owner(run_id, here)
            intact = [n for n in names if n in here.checkpoints and not here.incomplete_files(here.checkpoints[n])]
            sent_bytes, problems = 0, list[DamagedCheckpoint]()
            for name in intact:
                try:
                    sent_bytes += self._put(name, here, is_new=name == intact[-1])
                except DamagedCheckpoint as problem:
                    problems.append(problem)
            # Raise before the deletions below, so that the mirror keeps all its checkpoints.
            if problems:
                raise problems[0]
            self._delete(checkpoint for name, checkpoint in self._target.checkpoints.items() if name not in names)
            warnings = self._quarantine_damaged(exclude=intact)
            return warnings + self._read_back(here, intact, sent_bytes)

    def delete_except(self, names: Collection[str]) -> None:
        """Delete the mirror's checkpoints not in `names`, but keep files that others need or that belong to none."""
        with self._wrap_errors(), self._store.lock():
            self._target.refresh()
            self._delete(candidate for name, candidate in self._target.checkpoints.items() if name not in names)

    def get(self, parent: Location, name: str | None = None) -> Location:
        """Fetch checkpoint `name`, or the newest one, into the store `parent`, where it appears atomically. Return its
        location.

        Raises MesetaError if the checkpoint is missing or invalid, files have other sizes than its manifest states,
        they do not fit on the disk, or a checkpoint in `parent` needs other content of the same files.
        """
        candidate = next(self.checkpoints(newest_first=True), None) if name is None else self._read_entry(name)
        if candidate is None:
            raise MesetaError(f"checkpoint {self.url!r} holds no checkpoint{f' {name}' if name else ''}; check the URL")
        if candidate.manifest is None:
            raise MesetaError(candidate.problem)
        num_bytes, free_bytes = (
            sum(entry["num_bytes"] for entry in file_entries(candidate.manifest)),
            _free_bytes(parent),
        )
        if num_bytes > free_bytes:
            raise MesetaError(
                f"checkpoint '{self.url}/{candidate.name}' has {num_bytes:,} bytes, but the disk of {str(parent)!r} "
                f"has {free_bytes:,} free; free disk space"
            )
        try:
            target = StoreContents(make_store(parent))
            with target.store.lock():
                target.refresh()
                for other in target.checkpoints.values():
                    if other.conflicts_with(CheckpointFiles.from_manifest(candidate.name, candidate.manifest)):
                        raise MesetaError(
                            f"checkpoint '{self.url}/{candidate.name}' cannot be fetched: {str(parent)!r} holds "
                            f"{other.name} of another run, which has other content in the same files; "
                            "choose another folder"
                        )
                _copy_checkpoint(self._store.parent / candidate.name, candidate.manifest, target)
            path: Location = target.store.parent / candidate.name
            return path
        except OSError as error:
            raise MesetaError(f"checkpoint {str(parent)!r}: {error.strerror or error}; make room there") from None

    def _refresh_source(self, folder: Location) -> StoreContents:
        if self._source is None or self._source.store.parent != folder:
            self._source = StoreContents(make_store(folder))
        self._source.refresh()
        return self._source

    def _check_owner(self, run_id: str | None, here: StoreContents) -> None:
        there = self._target.checkpoints
        others = [foreign for foreign in there.values() if foreign.run_id not in (None, run_id)]
        newest = max(there.values(), key=lambda foreign: foreign.step, default=None)
        if newest is None or (not others and newest.run_id is not None):
            return
        common = max((here.checkpoints[name].step for name in there.keys() & here.checkpoints.keys()), default=None)
        if not others and common is not None:
            name = checkpoint_name(common)
            if there[name].content_digest == here.checkpoints[name].content_digest:
                return
        foreign = others[-1] if others else newest
        step = max((checkpoint.step for checkpoint in here.checkpoints.values()), default=0)
        owner = f"run {foreign.run_id}" if foreign.run_id else "a run without an id"
        raise MesetaError(
            f"checkpoint.mirror {self.url!r} holds checkpoints of another run: the newest there is step {foreign.step} "
            f"of {owner}, and this is run {run_id} at step {step}; choose another checkpoint.mirror, or move its "
            "checkpoints away"
        )

    def _put(self, name: str, here: StoreContents, *, is_new: bool) -> int:
        """Copy a checkpoint and return the number of bytes sent. Raises DamagedCheckpoint if a file is damaged."""
        # Unless it `is_new`, the files of the checkpoint are verified before they are sent.
        checkpoint, there = here.checkpoints[name], self._target
        self._delete(existing for existing in there.checkpoints.values() if existing.conflicts_with(checkpoint))
        source, former = here.store.parent / name, there.checkpoints.get(name)
        if former is not None and former.manifest_checksum == checkpoint.manifest_checksum:
            return self._send(name, here, there.incomplete_files(checkpoint))
        if isinstance(self._store.parent, RemotePath) and (former is not None or name in there.damaged):
            self._store.discard(self._store.parent / name)  # Object stores cannot replace it by a rename.
            there.invalidate([name])
        manifest = read_manifest(source)
        if not is_new:
            check_content(source, manifest, {path_in_store(name, entry) for entry in own_file_entries(manifest)})
        num_bytes = _copy_checkpoint(source, manifest, there)
        there.add(checkpoint)
        return num_bytes

    def _send(self, name: str, here: StoreContents, paths: Sequence[str]) -> int:
        """Send files again and return their bytes. Raises DamagedCheckpoint if a source is damaged."""
        if not paths:
            return 0
        source, checkpoint = here.store.parent / name, here.checkpoints[name]
        check_content(source, read_manifest(source), paths)
        for path in paths:
            folder, _, inner = path.partition("/")
            with self._store.replacement_path(folder, inner) as target:
                copy_file(here.store.parent / path, target, checkpoint.files[path][0])
        self._target.invalidate([])
        return sum(checkpoint.files[path][0] for path in paths)

    def _delete(self, doomed: Iterator[CheckpointFiles]) -> None:
        if names := [checkpoint.name for checkpoint in doomed]:
            self._store.delete([self._store.parent / name for name in names])
            self._target.invalidate(names)

    def _quarantine_damaged(self, *, exclude: Collection[str]) -> list[str]:
        problems = {name: str(problem) for name, problem in self._target.damaged.items()}
        for name, candidate in self._target.checkpoints.items():
            if name not in exclude and (paths := self._target.incomplete_files(candidate)):
                problems[name] = f"checkpoint file '{self.url}/{paths[0]}' is missing or has another size"
        for name, problem in problems.items():
            self._store.quarantine(self._store.parent / name, problem)
        self._target.invalidate(problems)
        return [f"{problem}: {name} at the mirror is quarantined" for name, problem in problems.items()]

    def _read_back(self, here: StoreContents, names: Sequence[str], num_bytes: int) -> list[str]:
        owners = {path: name for name in names for path in here.checkpoints[name].files}
        sizes = {path: here.checkpoints[name].files[path][0] for path, name in owners.items()}
        warnings = []
        for path in self._readback.find_differences(here.store.parent, self._store.parent, sizes, num_bytes):
            try:
                self._send(owners[path], here, [path])
                warnings.append(f"checkpoint file '{self.url}/{path}' had changed and was sent again")
            except DamagedCheckpoint as problem:
                warnings.append(f"{problem}; the file at the mirror {self.url!r} differs and was not replaced")
        return warnings

    def _read_entry(self, name: str) -> MirrorEntry | None:
        """Read the manifest. Return `None` if it is missing, incomplete or of an unknown format. Raises StorageError if
        a read fails."""
        path = self._store.parent / name
        where = f"checkpoint file {str(path / MANIFEST_PATH)!r}"
        try:
            content = read_inner_file(path, MANIFEST_PATH)
        except FileNotFoundError:
            return None
        except OSError as error:
            if is_read_failure(error):  # The checkpoint may exist.
                raise read_error(path / MANIFEST_PATH, error) from None
            return MirrorEntry(
                name=name, manifest=None, problem=str(malformed_manifest_error(where, str(error.strerror)))
            )
        try:
            manifest = parse_manifest(where, content)
        except MesetaError:
            return None
        try:
            check_manifest(where, manifest)
            if checkpoint_name(manifest["step"]) != name:
                raise malformed_manifest_error(where, f"its step is {manifest['step']}")
        except MesetaError as error:
            return MirrorEntry(name=name, manifest=None, problem=str(error))
        return MirrorEntry(name=name, manifest=manifest, problem="")

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        with track_activity("using the mirror"), wrap_remote_errors("checkpoint", self.url, "used"):
            yield


def _copy_checkpoint(source: Location, manifest: Mapping[str, Any], target: StoreContents) -> int:
    """Copy a checkpoint atomically to a store, and return its bytes. Raises OSError if writing to a folder fails."""
    # Files of older checkpoints that it needs are copied too, except those that the store has with the same checksum.
    store = target.store
    folders = {entry["path"].rpartition("/")[0] for entry in own_file_entries(manifest)} - {""}
    growing: Location = store.begin(manifest["step"], sorted(folders))
    num_bytes = 0
    try:
        older = [e for e in file_entries(manifest) if split_path(e["path"])[0] is not None]
        missing = [e for e in older if not target.has_file(path_in_store(source.name, e), file_key(e))]
        if isinstance(source, Path):
            check_content(source, manifest, {path_in_store(source.name, entry) for entry in missing})
        for entry in [*own_file_entries(manifest), *missing]:
            folder, inner = split_path(entry["path"])
            if folder is None:
                copy_file(locate_file(source, entry), growing / inner, entry["num_bytes"])
            else:
                with store.replacement_path(folder, inner) as place:
                    copy_file(locate_file(source, entry), place, entry["num_bytes"])
            num_bytes += entry["num_bytes"]
        store.commit(growing, manifest)
    except BaseException:
        store.abort(growing)
        raise
    return num_bytes


def fetch(url: str, folder: Location) -> Location:
    """Fetch the checkpoint at a URL, or the newest one below it, into `folder`. Raises the errors of `Mirror.get`."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return Mirror(parent).get(folder, name) if CHECKPOINT_NAME_PATTERN.fullmatch(name) else Mirror(url).get(folder)


def _free_bytes(folder: Location) -> float:
    # The folder may not exist yet. At a URL there is no limit.
    if isinstance(folder, RemotePath):
        return math.inf
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
