"""A directory of checkpoints on this machine: each appears by one rename.

Three kinds of names lie in it:

    step-000000500          a checkpoint; only a rename makes one, so it is always whole. Or files of one that was
                            pruned, which newer ones need: then it has pruned.json instead of manifest.json
    .tmp-...                work in progress, or being deleted; never read, removed by the next save
    .old-step-000000500     the former checkpoint of a step, while a new one of the same step takes its place

One with quarantined.txt in it is none any more either (names.QUARANTINE_MARKER), and is left as it is.

Whatever else lies there is somebody else's and stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import check_no_concurrent_saves, read_with_retry, wrap_write_errors
from meseta.checkpoint.files.paths import CHECKPOINT_NAME_PATTERN
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.checkpoint.manifest import MANIFEST_PATH, write_manifest
from meseta.checkpoint.store.names import QUARANTINE_MARKER, QUARANTINE_MARKERS, checkpoint_name, parse_step
from meseta.checkpoint.store.references import referenced_files
from meseta.machine.files import (
    is_folder,
    is_link,
    list_names,
    move,
    path_exists,
    stat_if_exists,
    sync,
    walk_bottom_up,
    walk_files,
)
from meseta.machine.locks import try_lock
from meseta.spec import MesetaError

_TEMPORARY_PREFIX, _OLD_PREFIX = ".tmp-", ".old-"
PRUNED_MARKER = "pruned.json"
"""The manifest of a checkpoint that is none any more, whose files newer ones need."""
_UNFINISHED_PATTERN = re.compile(rf"\.tmp-(deleted-)?{CHECKPOINT_NAME_PATTERN.pattern}")


class DirectoryStore:
    """Checkpoints in a directory. Its methods raise OSError where the system refuses, and StorageError where it cannot
    tell what is there."""

    writes_locally = False

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._known_names: set[str] | None = None
        """Names of checkpoints that this store found when it was opened or has written; `None` if it was not opened."""

    def open(self) -> None:
        """Register the checkpoints that are there now. From then on a new one of another process is an error."""
        self._known_names = {path.name for path in (*self.list_candidates(), *self.quarantined())}

    def staging_path(self, step: int) -> Path:
        """Where a checkpoint grows before its commit."""
        return self.parent / f"{_TEMPORARY_PREFIX}{checkpoint_name(step)}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing a checkpoint here, but where the file system has no locks. Raises
        MesetaError where one does so now, or has saved here since `open`."""
        self._make_folder()
        descriptor = os.open(self.parent, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise MesetaError(
                    f"checkpoint {str(self.parent)!r}: another process writes a checkpoint there now; one run at a "
                    "time may, so stop it, or choose another directory"
                )
            check_no_concurrent_saves(
                self.list_candidates() if self._known_names is not None else (), self._known_names
            )
            yield
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        if not is_folder(self.parent):
            self.parent.mkdir(parents=True, exist_ok=True)  # another process may make it too
            sync(self.parent.parent)

    def begin(self, step: int, folders: Sequence[str]) -> Path:
        """Clean up after killed runs and make a fresh temporary directory with `folders` in it."""
        self._make_folder()
        growing = self.staging_path(step)
        for path in (self.parent / checkpoint_name(step), growing):
            if is_link(path) or (path_exists(path) and not is_folder(path)):
                raise FileExistsError(errno.EEXIST, "there is something of that name that is no folder", str(path))
        for path in self._unfinished_folders():
            shutil.rmtree(path)
        for path in [path for path in self._checkpoint_folders() if path.name.startswith(_OLD_PREFIX)]:
            current = self.parent / path.name.removeprefix(_OLD_PREFIX)
            if path_exists(current):
                self.discard(path)
            else:
                move(path, current)
        growing.mkdir()
        for folder in folders:
            (growing / folder).mkdir(parents=True, exist_ok=True)
        return growing

    def check_shared(self, growing: Path) -> None:
        """Raise MesetaError where this rank does not see what rank 0 has begun."""
        if not is_folder(growing):
            raise MesetaError(
                f"checkpoint {str(self.parent)!r}: this rank does not see what rank 0 made there; "
                "choose a directory that all hosts share"
            )

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, or of what is left of one, by path inside it.

        A file whose stamp is unchanged has not been written since.
        """
        home = self.parent / folder
        found = {path: stat_if_exists(path) for path in (walk_files(home) if is_folder(home) else ())}
        return {
            path.relative_to(home).as_posix(): (
                status.st_size,
                f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}",
            )
            for path, status in found.items()
            if status and stat.S_ISREG(status.st_mode)
        }

    @contextlib.contextmanager
    def replacement_path(self, folder: str, inner: str) -> Iterator[Path]:
        """Where to write a file of an older checkpoint, which one that grows needs; it appears by a rename, in a folder
        that is no checkpoint where there is none of the name."""
        home = self.parent / folder
        if not path_exists(home):
            begun = self.parent / f"{_TEMPORARY_PREFIX}{folder}"
            begun.mkdir()
            (begun / PRUNED_MARKER).write_text("{}\n")
            move(begun, home)
        target = home / inner
        if os.path.realpath(target.parent) != os.path.join(
            os.path.realpath(self.parent), folder, *inner.split("/")[:-1]
        ):
            raise OSError(errno.EPERM, "a link leads elsewhere", str(target.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY_PREFIX}{target.name}")
        temporary.unlink(missing_ok=True)
        yield temporary
        move(temporary, target)
        sync(target.parent)

    def commit(self, growing: Path, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None) -> Path:
        """Write the manifest of a checkpoint whose files are written and synced, and give it its final name, durably.

        A former checkpoint of the same step steps aside first. Killed between the two renames, `latest` finds it there.
        """
        write_manifest(growing, manifest, rate)
        for directory, _, _ in walk_bottom_up(growing):
            sync(directory)
        final = self.parent / growing.name.removeprefix(_TEMPORARY_PREFIX)
        former = self.parent / (_OLD_PREFIX + final.name)
        if path_exists(final):
            move(final, former)
        move(growing, final)
        sync(self.parent)
        if path_exists(former):
            self.discard(former)
        if self._known_names is not None:
            self._known_names.add(final.name)
        return final

    def abort(self, growing: Path) -> None:
        """Delete what has not become a checkpoint; what cannot be deleted now, the next save deletes."""
        with contextlib.suppress(OSError):
            self.discard(growing)

    def discard(self, path: Path) -> None:
        """Delete a checkpoint so that a kill in between leaves nothing that looks like one."""
        doomed = (
            path
            if path.name.startswith(_TEMPORARY_PREFIX)
            else path.with_name(f"{_TEMPORARY_PREFIX}deleted-{path.name}")
        )
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            move(path, doomed)
        shutil.rmtree(doomed)

    def delete(self, doomed: Sequence[Path]) -> None:
        """Delete checkpoints, and of those pruned before, but the files that others need. Nothing is deleted before all
        is read that this depends on."""
        needed = referenced_files([path for path in self.list_candidates() if path not in doomed])
        pruned = [
            path
            for path in self._checkpoint_folders()
            if _test_path(_is_pruned, path) and not _test_path(is_link, path)
        ]
        files = {path: read_with_retry(path, path, partial(_list_files, path)) for path in (*doomed, *pruned)}
        for path in doomed:
            if needed is None or any(isinstance(file, Path) and file.is_relative_to(path) for file in needed):
                move(path / MANIFEST_PATH, path / PRUNED_MARKER)  # it is a checkpoint no more
                pruned.append(path)
            else:
                self.discard(path)
        if needed is None:
            return
        for path in pruned:
            rest = files[path] - {path / PRUNED_MARKER, path / MANIFEST_PATH}  # one of them in either case
            if rest.isdisjoint(needed):
                self.discard(path)
                continue
            for file in rest - needed:
                file.unlink()

    def remove_all(self) -> None:
        """Delete all checkpoints, and what killed runs left of others."""
        for path in self._checkpoint_folders() + self._unfinished_folders():
            if not _test_path(is_link, path):
                self.discard(path)

    def list_candidates(self) -> list[Path]:
        """Directories named as checkpoints, by rising step; a former one only while nothing has taken its place, and
        none that was passed over."""
        paths = [path for path in self._checkpoint_folders() if _test_path(_is_checkpoint, path)]
        return sorted(paths, key=lambda path: (parse_step(path), path))

    def quarantine(self, path: Path, why: str) -> None:
        """Let a damaged checkpoint be none any more, with all that it has, until a new one takes its place."""
        marker = path / QUARANTINE_MARKER
        with wrap_write_errors(marker):
            with marker.open("x") as file:
                file.write(f"{why}\n")
            sync(marker)
            sync(path)

    def quarantined(self) -> list[Path]:
        """Those, by name."""
        return sorted(path for path in self._checkpoint_folders() if _test_path(_is_quarantined, path))

    def unrecognized_entries(self) -> list[Path]:
        """What lies here beside checkpoints and what becomes of them: it is never read, moved or deleted."""
        known = {*self._checkpoint_folders(), *self._unfinished_folders()}
        return sorted(self.parent / name for name in self._list_names() if self.parent / name not in known)

    def _checkpoint_folders(self) -> list[Path]:
        paths = [self.parent / name for name in self._list_names() if CHECKPOINT_NAME_PATTERN.fullmatch(name)]
        return [path for path in paths if _test_path(is_folder, path)]

    def _unfinished_folders(self) -> list[Path]:
        paths = [self.parent / name for name in self._list_names() if _UNFINISHED_PATTERN.fullmatch(name)]
        return [path for path in paths if _test_path(is_folder, path) and not _test_path(is_link, path)]

    def _list_names(self) -> list[str]:
        return read_with_retry(None, self.parent, lambda: list_names(self.parent))


def _test_path(question: Callable[[Path], bool], path: Path) -> bool:
    """Return the answer to a question about the checkpoint at `path`."""
    return read_with_retry(path, path, lambda: question(path))


def _list_files(path: Path) -> set[Path]:
    return {file for file in walk_files(path) if not is_folder(file)}  # no links to folders


def _is_checkpoint(path: Path) -> bool:
    is_former = path.name.startswith(_OLD_PREFIX) and path_exists(path.with_name(path.name.removeprefix(_OLD_PREFIX)))
    return not (is_former or _is_pruned(path) or _is_quarantined(path))


def _is_quarantined(path: Path) -> bool:
    return any(stat_if_exists(path / name, follow=False) is not None for name in QUARANTINE_MARKERS)


def _is_pruned(path: Path) -> bool:
    """Whether a folder holds but files that newer checkpoints need, or did."""
    return path_exists(path / PRUNED_MARKER) and not path_exists(path / MANIFEST_PATH)
