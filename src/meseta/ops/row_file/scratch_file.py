"""Scratch files that are deleted when their process ends, or by the next process if it was killed."""

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
from meseta.system.files import to_file_name
from meseta.system.locks import try_lock
from meseta.system.processes import register_scratch_file, remove_scratch_file

SUFFIX = ".meseta-rows"


def _host_name() -> str:
    return to_file_name(socket.gethostname())


class ScratchFile:
    """Open file for exclusive use by this process: mode 0600, and locked with flock(2) while the process lives."""

    def __init__(self, folder: Path, name: str, owner: str, flags: int = 0) -> None:
        """Create a file in `folder` whose name contains `name`. Raises MesetaError, with prefix `owner`, on failure."""
        self.path = (
            folder / f"{to_file_name(name)[:100]}.{_host_name()[:60]}.{os.getpid()}.{secrets.token_hex(4)}{SUFFIX}"
        )
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o600)
            _lock_new_file(self.path, self.descriptor)
        except OSError as error:
            raise MesetaError(
                f"{owner}: cannot create a row file in {str(folder)!r} ({error_summary(error)}); "
                f"set storage.dir to a writable folder on a disk with free space"
            ) from None
        register_scratch_file(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, self.descriptor, os.getpid())

    def close(self) -> None:
        """Close and remove the file. Also called when the interpreter exits. A second call does nothing."""
        self._finalizer()


def _lock_new_file(path: Path, descriptor: int) -> None:
    """Lock a new file, or remove it if that fails: another process would treat an unlocked file as a leftover."""
    try:
        try_lock(descriptor)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def _remove(path: Path, descriptor: int, process: int) -> None:
    if os.getpid() == process:  # A forked child must not remove the file of its parent.
        remove_scratch_file(path)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove files that killed processes of this user on this host left in `folder`. Returns their paths.

    Locked files of running processes are kept, and so are files of other users and hosts.
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
    """Whether the file belongs to this user and is unlocked. False if this cannot be determined."""
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
