"""Directories of checkpoints: their names, the atomic commit, and what killed runs left behind.

Three kinds of names lie in the parent directory:

    step-000000500          a checkpoint; only a rename makes one, so it is always whole. Or files of one that was
                            pruned, which newer ones need: then it has pruned.json instead of manifest.json
    .tmp-...                work in progress, or being deleted; never read, removed by the next save
    .old-step-000000500     the former checkpoint of a step, while a new one of the same step takes its place

A step-... with passed-over.txt in it is damaged, or needs a file that is, and a run has gone back behind it: it is
counted, read and deleted no more, until a new one of its step takes its place.

Whatever else lies there is somebody else's and stays as it is.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meseta.checkpoint.failures import DamagedCheckpoint, file_of
from meseta.checkpoint.files.paths import NAME, split_path
from meseta.checkpoint.manifest import MANIFEST_PATH, entries_of, read_manifest
from meseta.machine.files import move, sync
from meseta.machine.locks import try_lock
from meseta.spec import MesetaError

_TEMPORARY, _OLD = ".tmp-", ".old-"
PRUNED = "pruned.json"
"""The manifest of a checkpoint that is none any more, whose files newer ones need."""
PASSED_OVER = "passed-over.txt"
"""Of a checkpoint that a run has gone back behind; says why."""
_UNFINISHED = re.compile(rf"\.tmp-(deleted-)?{NAME.pattern}")


@contextmanager
def sole_writer(parent: Path) -> Iterator[None]:
    """Keep other processes from writing a checkpoint in `parent`, which is made where it is not there; a file system
    without locks does not. Raises MesetaError where one does so now, and OSError."""
    _make(parent)
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            raise MesetaError(
                f"checkpoint {str(parent)!r}: another process writes a checkpoint there now; one run at a time may, so "
                "stop it, or choose another directory"
            )
        yield
    finally:
        os.close(descriptor)


def begin(parent: Path, step: int, folders: list[str]) -> Path:
    """Clean up after killed runs and make a fresh temporary directory with `folders` in it; for the `sole_writer`.
    Raises OSError."""
    _make(parent)
    final, temporary = checkpoint_path(parent, step), temporary_path(parent, step)
    for path in (final, temporary):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise FileExistsError(errno.EEXIST, "there is something of that name that is no folder", str(path))
    for path in [path for path in parent.iterdir() if _UNFINISHED.fullmatch(path.name) and _is_folder(path)]:
        shutil.rmtree(path)
    for path in [path for path in _checkpoints(parent) if path.name.startswith(_OLD)]:
        current = parent / path.name.removeprefix(_OLD)
        if current.exists():
            discard(path)
        else:
            move(path, current)
    temporary.mkdir()
    for folder in folders:
        (temporary / folder).mkdir(parents=True)
    return temporary


def _make(parent: Path) -> None:
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)  # another process may make it too
        sync(parent.parent)


def checkpoint_path(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step is, for example 'checkpoints/step-000000500'."""
    return parent / f"step-{step:09d}"


def temporary_path(parent: Path, step: int) -> Path:
    """Where a checkpoint grows before its commit."""
    return checkpoint_path(parent, step).with_name(f"{_TEMPORARY}{checkpoint_path(parent, step).name}")


def commit(temporary: Path) -> Path:
    """Give a finished and synced temporary directory its final name, durably; raises OSError.

    A former checkpoint of the same step steps aside first. Killed between the two renames, `latest` finds it there.
    """
    for directory, _, _ in os.walk(temporary, topdown=False):
        sync(Path(directory))
    final = temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
    former = final.with_name(_OLD + final.name)
    if final.exists():
        move(final, former)
    move(temporary, final)
    sync(final.parent)
    if former.exists():
        discard(former)
    return final


def discard(path: Path) -> None:
    """Delete a directory so that a kill in between leaves nothing that looks like a checkpoint; raises OSError."""
    doomed = path if path.name.startswith(_TEMPORARY) else path.with_name(f"{_TEMPORARY}deleted-{path.name}")
    if doomed != path:
        shutil.rmtree(doomed, ignore_errors=True)
        move(path, doomed)
    shutil.rmtree(doomed)


def remove_all(parent: Path) -> None:
    """Delete all checkpoints in a directory, if it is there, and what killed runs left of others; raises OSError."""
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        if (NAME.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)) and _is_folder(path):
            discard(path)


def latest(parent: Path | str) -> Path | None:
    """The checkpoint of the highest step in `parent`, None when there is none; only looks, changes nothing.

    Temporary directories, and directories that lack their manifest or a file, are passed over. One whose manifest
    cannot be understood (damaged, or of another version) is not: `load` then says so, which is better than going back
    in silence.
    """
    for path in reversed(named(Path(parent))):
        if (path / MANIFEST_PATH).exists():
            try:
                manifest = read_manifest(path)
            except MesetaError:
                return path
            if _has_files(path, manifest):
                return path
    return None


def newest(parent: Path | str) -> Path | None:
    """The checkpoint of the highest step in `parent`, whole or not, None when there is none.

    What a run goes on from: `load` refuses it where it is damaged, and nothing goes back to an older one in silence.
    """
    found = [path for path in named(Path(parent)) if any(path.iterdir())]
    return found[-1] if found else None


def prune(parent: Path | str, keep_last: int, keep_step: int | None = None) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints in `parent`; returns those deleted, oldest first.

    The one of step `keep_step` is neither counted nor deleted. Only whole checkpoints count and are deleted. Files that
    others need stay until those are gone. To be called by one rank. Raises MesetaError when `keep_last` is below 1 or a
    checkpoint cannot be deleted.
    """
    if keep_last < 1:
        raise MesetaError(f"checkpoint: keep_last must be at least 1, got {keep_last}")
    kept = None if keep_step is None else checkpoint_path(Path(parent), keep_step)
    others = [path for path in named(Path(parent)) if path != kept]
    if len(others) <= keep_last:  # whole or not, which takes reading their manifests
        return []
    doomed = [path for path in others if _is_whole(path)][:-keep_last]
    try:
        _delete(Path(parent), doomed)
    except OSError as error:
        raise MesetaError(f"checkpoint {str(error.filename)!r} cannot be deleted: {error.strerror}") from None
    return doomed


def _delete(parent: Path, doomed: Sequence[Path]) -> None:
    """Delete checkpoints, and of those pruned before, but the files that others need; raises OSError."""
    needed = _needed([path for path in named(parent) if path not in doomed])
    for path in doomed:
        if needed is None or any(file.is_relative_to(path) for file in needed):
            move(path / MANIFEST_PATH, path / PRUNED)  # it is a checkpoint no more
        else:
            discard(path)
    if needed is None:
        return
    for path in [path for path in _checkpoints(parent) if _is_pruned(path) and _is_folder(path)]:
        files = {file for file in path.rglob("*") if not file.is_dir()} - {path / PRUNED}
        if files.isdisjoint(needed):
            discard(path)
            continue
        for file in files - needed:
            file.unlink()


def _needed(checkpoints: Sequence[Path]) -> set[Path] | None:
    """Files that these checkpoints need, their own and others'; None where one is of a later version, of which nobody
    here knows what it needs. A damaged one needs nothing any more."""
    needed: set[Path] = set()
    for path in checkpoints:
        try:
            needed |= {lies_at(path, entry["path"]) for entry in entries_of(read_manifest(path))}
        except DamagedCheckpoint:
            continue
        except MesetaError:
            return None
    return needed


def lies_at(path: Path, inner: str) -> Path:
    """Where a file of the checkpoint at `path` is, in the folder of all."""
    folder, inner = split_path(inner)
    return (path if folder is None else path.with_name(folder)) / inner


def _is_pruned(path: Path) -> bool:
    """Whether a folder holds but files that newer checkpoints need, or did."""
    return (path / PRUNED).exists() and not (path / MANIFEST_PATH).exists()


def named(parent: Path) -> list[Path]:
    """Directories named as checkpoints, by rising step; a former one only while nothing has taken its place, and none
    that was passed over."""
    found = []
    for path in _checkpoints(parent):
        if _is_pruned(path) or os.path.lexists(path / PASSED_OVER):
            continue
        if not (path.name.startswith(_OLD) and path.with_name(path.name.removeprefix(_OLD)).exists()):
            found.append((int(path.name.removeprefix(_OLD).removeprefix("step-")), path))
    return [path for _, path in sorted(found)]


def pass_over(path: Path, why: str) -> None:
    """Let a damaged checkpoint be none any more, with all that it has; raises OSError."""
    with (path / PASSED_OVER).open("x") as file:
        file.write(f"{why}\n")
    sync(path / PASSED_OVER)
    sync(path)


def passed_over(parent: Path) -> list[Path]:
    """Checkpoints that a run has gone back behind, by name."""
    return sorted(path for path in _checkpoints(parent) if os.path.lexists(path / PASSED_OVER))


def strangers(parent: Path) -> list[Path]:
    """What lies in `parent` beside checkpoints and what becomes of them: it is never read, moved or deleted."""
    if not parent.is_dir():
        return []
    known = set(_checkpoints(parent))
    known |= {path for path in parent.iterdir() if _UNFINISHED.fullmatch(path.name) and _is_folder(path)}
    return sorted(path for path in parent.iterdir() if path not in known)


def _checkpoints(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if NAME.fullmatch(path.name) and path.is_dir()] if parent.is_dir() else []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_files(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every file that the manifest names is there with its size."""
    try:
        for entry in entries_of(manifest):
            file_of(path, entry)
    except MesetaError:
        return False
    return True


def _is_whole(path: Path) -> bool:
    try:
        return _has_files(path, read_manifest(path))
    except MesetaError:
        return False
