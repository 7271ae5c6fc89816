"""Locks on folders with flock(2), which the system releases when their process ends."""

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

# NFS returns EBADF for a folder.
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def try_lock(descriptor: int, *, if_unsupported: bool = True) -> bool:
    """Try to lock an open file or folder with flock(2). Returns False if another process holds the lock.

    Returns `if_unsupported` on a file system without locks. Raises OSError if the call fails for another reason.
    """
    # After such an error, for example EIO, it is unknown whether another process holds the lock.
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
    """Lock on a folder by a file in it. A file left behind by a killed process does not lock the folder."""

    def __init__(self, folder: Path, in_use: Callable[[str], str] | None = None, *, file: str = LOCK_FILE) -> None:
        """Create a lock without acquiring it.

        `in_use` is a function from the lock's holder to an error message. Locks with different names of `file` are
        independent.
        """
        self._path = folder / file
        self._format_refusal = in_use or f"{str(folder)!r} is in use by {{}}; wait until it has ended".format
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder. Does nothing if this object holds the lock, or on a file system without locks.

        Raises MesetaError with the name of the process if another one holds the lock, and OSError if the folder cannot
        be written.
        """
        while self._descriptor is None:
            # O_NOFOLLOW, because a link could lead to a file elsewhere, which would be overwritten.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, f"{self._path.name} is not a regular file", str(self._path))
                if not self._try_acquire(descriptor):
                    continue
                with contextlib.suppress(OSError):  # The disk may be full. The lock works without a name.
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
        """Try to lock an open lock file. Returns False if the former holder removed the file in the meantime."""
        if not try_lock(descriptor):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise MesetaError(self._format_refusal(holder))
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
