"""Scratch files of a process: for its user alone, locked, removed at the end, or at the next start if it was killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import weakref
from pathlib import Path

from meseta.errors import MesetaError, error_summary
from meseta.machine.files import to_file_name
from meseta.machine.locks import try_lock
from meseta.machine.processes import register_scratch_file, remove_scratch_file

SUFFIX = ".meseta-rows"


def _host_name() -> str:
    return to_file_name(socket.gethostname())


class ScratchFile:
    """An open file that no other process opens: mode 0600, locked with flock(2) for as long as this process lives."""

    def __init__(self, folder: Path, name: str, owner: str, flags: int = 0) -> None:
        """A new file in `folder`, named after `name`. Raises MesetaError, naming `owner`, where there can be none."""
        self.path = (
            folder / f"{to_file_name(name)[:100]}.{_host_name()[:60]}.{os.getpid()}.{secrets.token_hex(4)}{SUFFIX}"
        )
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o600)
            _lock_new_file(self.path, self.descriptor)
        except OSError as error:
            raise MesetaError(
                f"{owner}: its file in {str(folder)!r} cannot be made ({error_summary(error)}); "
                f"set storage.dir to a folder that can be written, on a disk with room"
            ) from None
        register_scratch_file(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, self.descriptor, os.getpid())

    def close(self) -> None:
        """Close and remove it; a second call does nothing. At the end of the interpreter it is called too."""
        self._finalizer()


def _lock_new_file(path: Path, descriptor: int) -> None:
    """Lock a new file. Without a lock another process could take it for a leftover, so a failure removes it."""
    try:
        try_lock(descriptor)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def _remove(path: Path, descriptor: int, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        remove_scratch_file(path)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed processes of this user on this host have left in a folder, and say which files these were.

    Files of living processes are locked and stay, and so do those of other users and other hosts.
    """
    pattern = re.compile(rf".+\.{re.escape(_host_name()[:60])}\.\d+\.[0-9a-f]{{8}}{re.escape(SUFFIX)}")
    removed = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if pattern.fullmatch(path.name) and _is_leftover(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_leftover(path: Path) -> bool:
    """Whether it is a file of this user that nobody has locked. Where that cannot be known it is not."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            return False
        return try_lock(descriptor, if_unsupported=False)
    except OSError:
        return False
    finally:
        os.close(descriptor)
