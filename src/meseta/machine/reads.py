"""Questions to a file system that never take a failed read for an absence."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path


class RefusedFile(OSError):
    """The error of a file that must not be read: it is not regular, a link leads out of its folder, or it is too long."""


def is_read_failure(error: OSError) -> bool:
    """Whether a read failed without saying anything about what is stored: the disk, the network, a limit of the process
    or a permission is at fault, and the same read may succeed later. False for a file that is missing or refused."""
    absent = (RefusedFile, FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return not isinstance(error, absent) and error.errno != errno.ELOOP


def status_at(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    """Return the status of what is at a path, `None` if nothing is there.

    Raises OSError if the system cannot tell. `os.path.exists` and its relatives then answer that nothing is there, and
    so do those of Path, depending on the error and the version of Python.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError as error:
        if is_read_failure(error):
            raise
        return None


def is_there(path: str | Path) -> bool:
    """Whether a path leads to anything. Raises OSError if the system cannot tell."""
    return status_at(path) is not None


def is_folder(path: str | Path) -> bool:
    """Whether a path leads to a folder. Raises OSError if the system cannot tell."""
    status = status_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | Path) -> bool:
    """Whether a path is a symbolic link. Raises OSError if the system cannot tell."""
    status = status_at(path, follow=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, none if there is no such folder. Raises OSError if the system cannot tell."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if is_read_failure(error):
            raise
        return []


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all that is below a folder and is no folder itself; links are not followed. Raises OSError if some of it
    cannot be listed, which `Path.rglob` and `os.walk` leave out."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(folder / entry.name)
            else:
                yield folder / entry.name


def walk_up(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """`os.walk` from the innermost folders up. Raises OSError if one cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for inner, folders, names in os.walk(folder, topdown=False, onerror=fail):
        yield Path(inner), folders, names
