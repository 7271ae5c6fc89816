"""A directory of checkpoints on this machine: each appears by one rename.

Three kinds of names lie in it:

    step-000000500          a checkpoint; only a rename makes one, so it is always whole. Or files of one that was
                            pruned, which newer ones need: then it has pruned.json instead of manifest.json
    .tmp-...                work in progress, or being deleted; never read, removed by the next save
    .old-step-000000500     the former checkpoint of a step, while a new one of the same step takes its place

One with passed-over.txt in it is none any more either (names.PASSED_OVER), and is left as it is.

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

from meseta.checkpoint.failures import check_known, read, writing
from meseta.checkpoint.files.paths import NAME
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.manifest import MANIFEST_PATH, write_manifest
from meseta.checkpoint.store.names import PASSED_OVER, checkpoint_name, named_step
from meseta.checkpoint.store.needs import needed_files
from meseta.machine.files import files_below, is_folder, is_link, is_there, move, names_in, status_at, sync, walk_up
from meseta.machine.locks import try_lock
from meseta.spec import MesetaError

_TEMPORARY, _OLD = ".tmp-", ".old-"
PRUNED = "pruned.json"
"""The manifest of a checkpoint that is none any more, whose files newer ones need."""
_UNFINISHED = re.compile(rf"\.tmp-(deleted-)?{NAME.pattern}")


class DirectoryStore:
    """Checkpoints in a directory. Its methods raise OSError where the system refuses, and StorageError where it cannot
    tell what is there."""

    writes_near = False

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._known: set[str] | None = None
        """Names of checkpoints that this store found when it was opened or has written; `None` if it was not opened."""

    def open(self) -> None:
        """Register the checkpoints that are there now. From then on a new one of another process is an error."""
        self._known = {path.name for path in (*self.named(), *self.passed_over())}

    def growing(self, step: int) -> Path:
        """Where a checkpoint grows before its commit."""
        return self.parent / f"{_TEMPORARY}{checkpoint_name(step)}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from writing a checkpoint here, but where the file system has no locks. Raises
        MesetaError where one does so now, or has saved here since `open`."""
        self._make()
        descriptor = os.open(self.parent, os.O_RDONLY)
        try:
            if not try_lock(descriptor):
                raise MesetaError(
                    f"checkpoint {str(self.parent)!r}: another process writes a checkpoint there now; one run at a "
                    "time may, so stop it, or choose another directory"
                )
            check_known(self.named() if self._known is not None else (), self._known)
            yield
        finally:
            os.close(descriptor)

    def _make(self) -> None:
        if not is_folder(self.parent):
            self.parent.mkdir(parents=True, exist_ok=True)  # another process may make it too
            sync(self.parent.parent)

    def begin(self, step: int, folders: Sequence[str]) -> Path:
        """Clean up after killed runs and make a fresh temporary directory with `folders` in it."""
        self._make()
        growing = self.growing(step)
        for path in (self.parent / checkpoint_name(step), growing):
            if is_link(path) or (is_there(path) and not is_folder(path)):
                raise FileExistsError(errno.EEXIST, "there is something of that name that is no folder", str(path))
        for path in self._unfinished():
            shutil.rmtree(path)
        for path in [path for path in self._checkpoints() if path.name.startswith(_OLD)]:
            current = self.parent / path.name.removeprefix(_OLD)
            if is_there(current):
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

    def files_of(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of the files of a checkpoint, or of what is left of one, by path inside it.

        A file whose stamp is unchanged has not been written since.
        """
        home = self.parent / folder
        found = {path: status_at(path) for path in (files_below(home) if is_folder(home) else ())}
        return {
            path.relative_to(home).as_posix(): (
                status.st_size,
                f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}",
            )
            for path, status in found.items()
            if status and stat.S_ISREG(status.st_mode)
        }

    @contextlib.contextmanager
    def older_file(self, folder: str, inner: str) -> Iterator[Path]:
        """Where to write a file of an older checkpoint, which one that grows needs; it appears by a rename, in a folder
        that is no checkpoint where there is none of the name."""
        home = self.parent / folder
        if not is_there(home):
            begun = self.parent / f"{_TEMPORARY}{folder}"
            begun.mkdir()
            (begun / PRUNED).write_text("{}\n")
            move(begun, home)
        target = home / inner
        if os.path.realpath(target.parent) != os.path.join(
            os.path.realpath(self.parent), folder, *inner.split("/")[:-1]
        ):
            raise OSError(errno.EPERM, "a link leads elsewhere", str(target.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY}{target.name}")
        temporary.unlink(missing_ok=True)
        yield temporary
        move(temporary, target)
        sync(target.parent)

    def commit(self, growing: Path, manifest: Mapping[str, Any], rate: WriteRate | None = None) -> Path:
        """Write the manifest of a checkpoint whose files are written and synced, and give it its final name, durably.

        A former checkpoint of the same step steps aside first. Killed between the two renames, `latest` finds it there.
        """
        write_manifest(growing, manifest, rate)
        for directory, _, _ in walk_up(growing):
            sync(directory)
        final = self.parent / growing.name.removeprefix(_TEMPORARY)
        former = self.parent / (_OLD + final.name)
        if is_there(final):
            move(final, former)
        move(growing, final)
        sync(self.parent)
        if is_there(former):
            self.discard(former)
        if self._known is not None:
            self._known.add(final.name)
        return final

    def give_up(self, growing: Path) -> None:
        """Delete what has not become a checkpoint; what cannot be deleted now, the next save deletes."""
        with contextlib.suppress(OSError):
            self.discard(growing)

    def discard(self, path: Path) -> None:
        """Delete a checkpoint so that a kill in between leaves nothing that looks like one."""
        doomed = path if path.name.startswith(_TEMPORARY) else path.with_name(f"{_TEMPORARY}deleted-{path.name}")
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            move(path, doomed)
        shutil.rmtree(doomed)

    def delete(self, doomed: Sequence[Path]) -> None:
        """Delete checkpoints, and of those pruned before, but the files that others need. Nothing is deleted before all
        is read that this depends on."""
        needed = needed_files([path for path in self.named() if path not in doomed])
        pruned = [path for path in self._checkpoints() if _ask(_is_pruned, path) and not _ask(is_link, path)]
        files = {path: read(path, path, partial(_files_of, path)) for path in (*doomed, *pruned)}
        for path in doomed:
            if needed is None or any(isinstance(file, Path) and file.is_relative_to(path) for file in needed):
                move(path / MANIFEST_PATH, path / PRUNED)  # it is a checkpoint no more
                pruned.append(path)
            else:
                self.discard(path)
        if needed is None:
            return
        for path in pruned:
            rest = files[path] - {path / PRUNED, path / MANIFEST_PATH}  # one of them in either case
            if rest.isdisjoint(needed):
                self.discard(path)
                continue
            for file in rest - needed:
                file.unlink()

    def remove_all(self) -> None:
        """Delete all checkpoints, and what killed runs left of others."""
        for path in self._checkpoints() + self._unfinished():
            if not _ask(is_link, path):
                self.discard(path)

    def named(self) -> list[Path]:
        """Directories named as checkpoints, by rising step; a former one only while nothing has taken its place, and
        none that was passed over."""
        paths = [path for path in self._checkpoints() if _ask(_is_checkpoint, path)]
        return sorted(paths, key=lambda path: (named_step(path), path))

    def pass_over(self, path: Path, why: str) -> None:
        """Let a damaged checkpoint be none any more, with all that it has, until a new one takes its place."""
        marker = path / PASSED_OVER
        with writing(marker):
            with marker.open("x") as file:
                file.write(f"{why}\n")
            sync(marker)
            sync(path)

    def passed_over(self) -> list[Path]:
        """Those, by name."""
        return sorted(path for path in self._checkpoints() if _ask(_is_passed_over, path))

    def strangers(self) -> list[Path]:
        """What lies here beside checkpoints and what becomes of them: it is never read, moved or deleted."""
        known = {*self._checkpoints(), *self._unfinished()}
        return sorted(self.parent / name for name in self._names() if self.parent / name not in known)

    def _checkpoints(self) -> list[Path]:
        paths = [self.parent / name for name in self._names() if NAME.fullmatch(name)]
        return [path for path in paths if _ask(is_folder, path)]

    def _unfinished(self) -> list[Path]:
        paths = [self.parent / name for name in self._names() if _UNFINISHED.fullmatch(name)]
        return [path for path in paths if _ask(is_folder, path) and not _ask(is_link, path)]

    def _names(self) -> list[str]:
        return read(None, self.parent, lambda: names_in(self.parent))


def _ask(question: Callable[[Path], bool], path: Path) -> bool:
    """Return the answer to a question about the checkpoint at `path`."""
    return read(path, path, lambda: question(path))


def _files_of(path: Path) -> set[Path]:
    return {file for file in files_below(path) if not is_folder(file)}  # no links to folders


def _is_checkpoint(path: Path) -> bool:
    is_former = path.name.startswith(_OLD) and is_there(path.with_name(path.name.removeprefix(_OLD)))
    return not (is_former or _is_pruned(path) or _is_passed_over(path))


def _is_passed_over(path: Path) -> bool:
    return status_at(path / PASSED_OVER, follow=False) is not None


def _is_pruned(path: Path) -> bool:
    """Whether a folder holds but files that newer checkpoints need, or did."""
    return is_there(path / PRUNED) and not is_there(path / MANIFEST_PATH)
