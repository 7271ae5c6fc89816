"""Locks that the system gives back when their process ends, however it ends: flock(2)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from meseta.errors import MesetaError

LOCK_FILE = ".lock"

_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""What flock(2) answers on file systems without locks; EBADF is NFS about a folder."""


def try_lock(descriptor: int, *, if_unsupported: bool = True) -> bool:
    """Try to lock an open file or folder with flock(2); returns False if another process holds the lock.

    Returns `if_unsupported` on a file system without locks. Raises OSError if the call fails otherwise, as with EIO:
    then it is not known whether another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        return if_unsupported
    return True


class FolderLock:
    """A lock on a folder: on the file `.lock` in it, so that one which a killed process has left behind locks
    nothing."""

    def __init__(self, folder: Path, in_use: Callable[[str], str] | None = None) -> None:
        """`in_use` words the refusal, given who holds the lock."""
        self._path = folder / LOCK_FILE
        self._format_refusal = (
            in_use or f"{str(folder)!r} is in use: {{}} is at work in it; wait until it has ended".format
        )
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder, unless this object has done so already. A file system that has no locks is not locked.

        Raises MesetaError, naming the process, where another one holds the lock, and OSError where the folder cannot be
        written.
        """
        while self._descriptor is None:
            # Through a link it would be another file that is written.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, f"{LOCK_FILE} is no regular file", str(self._path))
                if not self._try_acquire(descriptor):
                    continue
                with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Unlock the folder and remove the file."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _try_acquire(self, descriptor: int) -> bool:
        """Whether the lock is held now; not where its file was removed, by the former holder, before it was locked."""
        if not try_lock(descriptor):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise MesetaError(self._format_refusal(holder))
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
