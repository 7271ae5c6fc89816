"""Store of checkpoints in a folder. Each checkpoint appears by a rename."""

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
from meseta.checkpoint.files.direct_io import WriteRateLimiter
from meseta.checkpoint.files.paths import (
    CHECKPOINT_NAME_PATTERN,
    QUARANTINE_MARKER,
    QUARANTINE_MARKERS,
    checkpoint_name,
    parse_step,
)
from meseta.checkpoint.manifest import MANIFEST_PATH, referenced_files, write_manifest
from meseta.spec import MesetaError
from meseta.system.files import (
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
from meseta.system.locks import try_lock

# Entries of the folder:
#
# step-000000500          checkpoint, complete because only a rename creates it. If it contains pruned.json instead of
#                         manifest.json, it was pruned, and newer checkpoints need its files. If it contains
#                         QUARANTINE_MARKER, it is quarantined and not changed.
# .tmp-...                checkpoint that is being written or deleted. It is never read, and the next save removes it.
# .old-step-000000500     former checkpoint of a step, while a new checkpoint of the step replaces it
#
# All other entries belong to the user, and are not changed.
_TEMPORARY_PREFIX, _OLD_PREFIX = ".tmp-", ".old-"
PRUNED_MARKER = "pruned.json"
"""Manifest of a pruned checkpoint, whose remaining files newer checkpoints need."""
_UNFINISHED_PATTERN = re.compile(rf"\.tmp-(deleted-)?{CHECKPOINT_NAME_PATTERN.pattern}")


class DirectoryStore:
    """Store of checkpoints in a folder. Methods raise OSError if a system call fails, StorageError if reads fail."""

    writes_locally = False

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        # Checkpoints that existed at `open` or that this store wrote. `None` before `open`.
        self._known_names: set[str] | None = None

    def open(self) -> None:
        self._known_names = {path.name for path in (*self.list_candidates(), *self.quarantined())}

    def staging_path(self, step: int) -> Path:
        return self.parent / f"{_TEMPORARY_PREFIX}{checkpoint_name(step)}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager that keeps other processes from writing a checkpoint, unless the file system does not support
        locks.

        Raises MesetaError if another process is writing a checkpoint, or has saved one since `open`.
        """
        self._make_folder()
        descriptor = os.open(self.parent, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise MesetaError(
                    f"checkpoint folder {str(self.parent)!r}: another process is writing a checkpoint to it; stop that "
                    "run, or choose another folder"
                )
            check_no_concurrent_saves(
                self.list_candidates() if self._known_names is not None else (), self._known_names
            )
            yield
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        if not is_folder(self.parent):
            self.parent.mkdir(parents=True, exist_ok=True)  # Another process may create it too.
            sync(self.parent.parent)

    def begin(self, step: int, folders: Sequence[str]) -> Path:
        """Clean up after killed runs, and create an empty staging folder with `folders` in it. Return the staging
        folder."""
        self._make_folder()
        growing = self.staging_path(step)
        for path in (self.parent / checkpoint_name(step), growing):
            if is_link(path) or (path_exists(path) and not is_folder(path)):
                raise FileExistsError(errno.EEXIST, "the path exists and is not a folder", str(path))
        for path in self._unfinished_folders():
            shutil.rmtree(path)
        # A run was killed while it replaced a checkpoint. Finish the replacement, or undo it if the new one is missing.
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
        if not is_folder(growing):
            raise MesetaError(
                f"checkpoint folder {str(self.parent)!r}: this rank does not see the files of rank 0; choose a folder "
                "that all hosts share"
            )

    def list_files(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, pruned or not, by inner path. Writes change the stamp."""
        home = self.parent / folder
        statuses = {path: stat_if_exists(path) for path in (walk_files(home) if is_folder(home) else ())}
        return {
            path.relative_to(home).as_posix(): (
                status.st_size,
                f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}",
            )
            for path, status in statuses.items()
            if status and stat.S_ISREG(status.st_mode)
        }

    @contextlib.contextmanager
    def replacement_path(self, folder: str, inner: str) -> Iterator[Path]:
        """Context manager that yields a path at which to write a new version of a file of an older checkpoint.

        The file then appears by a rename. If the checkpoint's folder is missing, it is created as that of a pruned
        checkpoint.
        """
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
            raise OSError(errno.EPERM, "a link leads out of the checkpoint folder", str(target.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY_PREFIX}{target.name}")
        temporary.unlink(missing_ok=True)
        yield temporary
        move(temporary, target)
        sync(target.parent)

    def commit(self, growing: Path, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None) -> Path:
        """Write the manifest, sync all folders, and rename the checkpoint to its final name."""
        write_manifest(growing, manifest, rate)
        for directory, _, _ in walk_bottom_up(growing):
            sync(directory)
        final = self.parent / growing.name.removeprefix(_TEMPORARY_PREFIX)
        former = self.parent / (_OLD_PREFIX + final.name)
        # After a kill between the renames, the former checkpoint is found under its temporary name.
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
        """Delete an unfinished checkpoint. If that fails, the next save deletes it."""
        with contextlib.suppress(OSError):
            self.discard(growing)

    def discard(self, path: Path) -> None:
        """Delete a checkpoint. A kill during the deletion leaves nothing that looks like a checkpoint."""
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
        """Delete checkpoints and unneeded files of pruned checkpoints, but keep files that other checkpoints need.

        Everything that this depends on is read before the first deletion.
        """
        needed = referenced_files([path for path in self.list_candidates() if path not in doomed])
        pruned = [
            path
            for path in self._checkpoint_folders()
            if _test_path(_is_pruned, path) and not _test_path(is_link, path)
        ]
        files = {path: read_with_retry(path, path, partial(_list_files, path)) for path in (*doomed, *pruned)}
        for path in doomed:
            if needed is None or any(isinstance(file, Path) and file.is_relative_to(path) for file in needed):
                move(path / MANIFEST_PATH, path / PRUNED_MARKER)  # From now on it is not a checkpoint.
                pruned.append(path)
            else:
                self.discard(path)
        if needed is None:
            return
        for path in pruned:
            rest = files[path] - {path / PRUNED_MARKER, path / MANIFEST_PATH}  # Exactly one of these two exists.
            if rest.isdisjoint(needed):
                self.discard(path)
                continue
            for file in rest - needed:
                file.unlink()

    def remove_all(self) -> None:
        for path in self._checkpoint_folders() + self._unfinished_folders():
            if not _test_path(is_link, path):
                self.discard(path)

    def list_candidates(self) -> list[Path]:
        """Return the folders that have the name of a checkpoint, ordered by step, without pruned and quarantined ones.

        Includes a former checkpoint only while no new checkpoint of its step exists.
        """
        paths = [path for path in self._checkpoint_folders() if _test_path(_is_checkpoint, path)]
        return sorted(paths, key=lambda path: (parse_step(path), path))

    def quarantine(self, path: Path, why: str) -> None:
        marker = path / QUARANTINE_MARKER
        with wrap_write_errors(marker):
            with marker.open("x") as file:
                file.write(f"{why}\n")
            sync(marker)
            sync(path)

    def quarantined(self) -> list[Path]:
        """Return the quarantined checkpoints, ordered by name."""
        return sorted(path for path in self._checkpoint_folders() if _test_path(_is_quarantined, path))

    def unrecognized_entries(self) -> list[Path]:
        """Return the entries that do not belong to checkpoints. They are never read, moved or deleted."""
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
    return read_with_retry(path, path, lambda: question(path))


def _list_files(path: Path) -> set[Path]:
    return {file for file in walk_files(path) if not is_folder(file)}  # Excludes links to folders.


def _is_checkpoint(path: Path) -> bool:
    is_former = path.name.startswith(_OLD_PREFIX) and path_exists(path.with_name(path.name.removeprefix(_OLD_PREFIX)))
    return not (is_former or _is_pruned(path) or _is_quarantined(path))


def _is_quarantined(path: Path) -> bool:
    return any(stat_if_exists(path / name, follow=False) is not None for name in QUARANTINE_MARKERS)


def _is_pruned(path: Path) -> bool:
    # A pruned checkpoint has only files that newer checkpoints need, or needed.
    return path_exists(path / PRUNED_MARKER) and not path_exists(path / MANIFEST_PATH)
