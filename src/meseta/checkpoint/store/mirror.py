"""Copies of a run's checkpoints in another store, at a URL of fsspec: s3://, gs://, hdfs://, file:// and others.

What lies there may be a stranger's: names, sizes and kinds of files are checked before the first byte is fetched,
written or deleted. A file that is there already is used only if a manifest there gives it the right checksum.
"""

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
from meseta.checkpoint.files.paths import CHECKPOINT_NAME_PATTERN, split_path
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
from meseta.checkpoint.store.names import checkpoint_name
from meseta.checkpoint.store.readback import ReadbackQueue
from meseta.checkpoint.store.store import make_store
from meseta.machine.files import is_read_failure
from meseta.machine.remote import Location, RemotePath, read_inner_file, wrap_remote_errors
from meseta.machine.waits.activity import track_activity
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class MirrorEntry:
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

    def __init__(self, url: str, readback_file: Path | None = None) -> None:
        """`readback_file` is the file that keeps the order in which files are read back; `None` keeps it in memory."""
        self.url = url.rstrip("/")
        self._store = make_store(self.url)
        if isinstance(self._store.parent, RemotePath):
            self._store.parent.check_installed()
        self._target = StoreContents(self._store)
        self._source: StoreContents | None = None
        """Contents of the store that `update` copies from."""
        self._readback = ReadbackQueue(readback_file)

    def names(self) -> list[str]:
        """What may be a checkpoint there, by its name alone, the oldest first; no links."""
        with self._wrap_errors():
            return [path.name for path in checkpoints_without_links(self._store)]

    def checkpoints(self, *, newest_first: bool = False) -> Iterator[MirrorEntry]:
        """The checkpoints there; of their manifests, one at a time is in memory."""
        names = self.names()
        for name in reversed(names) if newest_first else names:
            if (found := self._read_entry(name)) is not None:
                yield found

    def check_owner(self, run_id: str | None, folder: Location) -> None:
        """Raise MesetaError if checkpoints there belong to another run than the one that saves in `folder`.

        Checkpoints of versions without run ids are accepted if the newest step that both places have is equal in both.
        """
        with self._wrap_errors():
            self._target.refresh()
            self._check_owner(run_id, self._refresh_source(folder))

    def put(self, path: Location) -> None:
        """Copy a checkpoint there, with the files of older ones that it needs, except files that are there already.

        A former checkpoint of the step is replaced. Checkpoints there that need other content of the same files are
        deleted: they cannot be of the same run. Raises DamagedCheckpoint for a damaged checkpoint.
        """
        with self._wrap_errors(), self._store.lock():
            self._target.refresh()
            self._put(path.name, self._refresh_source(path.parent), is_new=False)

    def update(self, folder: Location, names: Collection[str], run_id: str | None) -> list[str]:
        """Make the mirror hold the intact checkpoints of `folder`, and no others of this run; returns warnings.

        Deletes checkpoints there that are not among `names`, except files that others need. Sets damaged ones aside
        that `folder` cannot replace. Then reads back as many bytes as it has sent, and sends damaged files again.
        Raises what `check_owner` raises, and MesetaError for a damaged file here that the mirror lacks.
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
            if problems:  # the mirror keeps what it has
                raise problems[0]
            self._delete(found for name, found in self._target.checkpoints.items() if name not in names)
            warnings = self._quarantine_damaged(exclude=intact)
            return warnings + self._read_back(here, intact, sent_bytes)

    def delete_except(self, names: Collection[str]) -> None:
        """Delete the checkpoints there that are not among `names`, but the files that those need; what is none, or none
        of ours, stays."""
        with self._wrap_errors(), self._store.lock():
            self._target.refresh()
            self._delete(found for name, found in self._target.checkpoints.items() if name not in names)

    def get(self, parent: Location, name: str | None = None) -> Location:
        """Fetch a checkpoint, None: the newest one, into the store `parent`, where it appears whole.

        Raises MesetaError also where there is none, where its manifest says what no checkpoint says, for files of other
        sizes than it says, where they do not fit on the disk, and where a checkpoint in `parent` needs other content of
        one of its files.
        """
        found = next(self.checkpoints(newest_first=True), None) if name is None else self._read_entry(name)
        if found is None:
            raise MesetaError(f"checkpoint {self.url!r} holds no checkpoint{f' {name}' if name else ''}; check the URL")
        if found.manifest is None:
            raise MesetaError(found.problem)
        num_bytes, free_bytes = sum(entry["num_bytes"] for entry in file_entries(found.manifest)), _free_bytes(parent)
        if num_bytes > free_bytes:
            raise MesetaError(
                f"checkpoint '{self.url}/{found.name}' has {num_bytes:,} bytes, and {str(parent)!r} has {free_bytes:,} "
                "free; make room there"
            )
        try:
            target = StoreContents(make_store(parent))
            with target.store.lock():
                target.refresh()
                for other in target.checkpoints.values():
                    if other.conflicts_with(CheckpointFiles.from_manifest(found.name, found.manifest)):
                        raise MesetaError(
                            f"checkpoint '{self.url}/{found.name}': {str(parent)!r} holds {other.name} of another run, "
                            "which needs other content of the same files; choose another folder"
                        )
                _copy_checkpoint(self._store.parent / found.name, found.manifest, target)
            path: Location = target.store.parent / found.name
            return path
        except OSError as error:
            raise MesetaError(f"checkpoint {str(parent)!r}: {error.strerror or error}; make room there") from None

    def _refresh_source(self, folder: Location) -> StoreContents:
        """Contents of the store that checkpoints are copied from, as they are now."""
        if self._source is None or self._source.store.parent != folder:
            self._source = StoreContents(make_store(folder))
        self._source.refresh()
        return self._source

    def _check_owner(self, run_id: str | None, here: StoreContents) -> None:
        there = self._target.checkpoints
        others = [found for found in there.values() if found.run_id not in (None, run_id)]
        newest = max(there.values(), key=lambda found: found.step, default=None)
        if newest is None or (not others and newest.run_id is not None):
            return
        common = max((here.checkpoints[name].step for name in there.keys() & here.checkpoints.keys()), default=None)
        if not others and common is not None:
            name = checkpoint_name(common)
            if there[name].content_digest == here.checkpoints[name].content_digest:
                return
        found = others[-1] if others else newest
        step = max((checkpoint.step for checkpoint in here.checkpoints.values()), default=0)
        owner = f"run {found.run_id}" if found.run_id else "a run without an id"
        raise MesetaError(
            f"checkpoint.mirror {self.url!r} holds checkpoints of another run: the newest there is step {found.step} "
            f"of {owner}, and this is run {run_id} at step {step}; choose another checkpoint.mirror, or move those away"
        )

    def _put(self, name: str, here: StoreContents, *, is_new: bool) -> int:
        """Returns the number of bytes sent. Its own files are checked before they are sent, unless it `is_new`. Raises
        DamagedCheckpoint if one is damaged."""
        checkpoint, there = here.checkpoints[name], self._target
        self._delete(found for found in there.checkpoints.values() if found.conflicts_with(checkpoint))
        source, former = here.store.parent / name, there.checkpoints.get(name)
        if former is not None and former.manifest_checksum == checkpoint.manifest_checksum:
            return self._send(name, here, there.incomplete_files(checkpoint))
        if isinstance(self._store.parent, RemotePath) and (former is not None or name in there.damaged):
            self._store.discard(self._store.parent / name)  # no rename can replace it
            there.invalidate([name])
        manifest = read_manifest(source)
        if not is_new:
            check_content(source, manifest, {path_in_store(name, entry) for entry in own_file_entries(manifest)})
        num_bytes = _copy_checkpoint(source, manifest, there)
        there.add(checkpoint)
        return num_bytes

    def _send(self, name: str, here: StoreContents, paths: Sequence[str]) -> int:
        """Send files of a checkpoint that is there; returns their bytes. Raises DamagedCheckpoint if one is damaged
        here."""
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
        if names := [found.name for found in doomed]:
            self._store.delete([self._store.parent / name for name in names])
            self._target.invalidate(names)

    def _quarantine_damaged(self, *, exclude: Collection[str]) -> list[str]:
        """Set damaged checkpoints aside; returns a warning for each."""
        problems = {name: str(problem) for name, problem in self._target.damaged.items()}
        for name, found in self._target.checkpoints.items():
            if name not in exclude and (paths := self._target.incomplete_files(found)):
                problems[name] = f"checkpoint file '{self.url}/{paths[0]}' is missing or has another size"
        for name, problem in problems.items():
            self._store.quarantine(self._store.parent / name, problem)
        self._target.invalidate(problems)
        return [f"{problem}: {name} at the mirror is set aside" for name, problem in problems.items()]

    def _read_back(self, here: StoreContents, names: Sequence[str], num_bytes: int) -> list[str]:
        """Compare at most `num_bytes` of the files there with those here; returns warnings."""
        owners = {path: name for name in names for path in here.checkpoints[name].files}
        sizes = {path: here.checkpoints[name].files[path][0] for path, name in owners.items()}
        warnings = []
        for path in self._readback.find_differences(here.store.parent, self._store.parent, sizes, num_bytes):
            try:
                self._send(owners[path], here, [path])
                warnings.append(f"checkpoint file '{self.url}/{path}' had changed and was sent again")
            except DamagedCheckpoint as problem:
                warnings.append(f"{problem}; the file at the mirror {self.url!r} differs and is left as it is")
        return warnings

    def _read_entry(self, name: str) -> MirrorEntry | None:
        """None where there is none, or half of one, or another format. Raises StorageError if a read fails."""
        path = self._store.parent / name
        where = f"checkpoint file {str(path / MANIFEST_PATH)!r}"
        try:
            content = read_inner_file(path, MANIFEST_PATH)
        except FileNotFoundError:
            return None
        except OSError as error:
            if is_read_failure(error):  # nobody knows whether there is one
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
                raise malformed_manifest_error(where, f"it is of step {manifest['step']}")
        except MesetaError as error:
            return MirrorEntry(name=name, manifest=None, problem=str(error))
        return MirrorEntry(name=name, manifest=manifest, problem="")

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        with track_activity("using the mirror"), wrap_remote_errors("checkpoint", self.url, "used"):
            yield


def _copy_checkpoint(source: Location, manifest: Mapping[str, Any], target: StoreContents) -> int:
    """Copy a checkpoint into a store, where it appears whole, with the files of older ones that it needs, except those
    that are there with their checksum; returns the number of bytes written. Raises OSError of a directory."""
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
    """Fetch the checkpoint at a URL, or the newest one below it, into `folder`; raises what `Mirror.get` raises."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return Mirror(parent).get(folder, name) if CHECKPOINT_NAME_PATTERN.fullmatch(name) else Mirror(url).get(folder)


def _free_bytes(folder: Location) -> float:
    """On the disk of a folder that may still have to be made; a URL has no end."""
    if isinstance(folder, RemotePath):
        return math.inf
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
