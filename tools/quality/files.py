"""Files and locks in the folder of a suite."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meseta.spec import MesetaError


def write_atomic(file: Path, text: str) -> None:
    """Replace a file. Another process sees the old or the new content."""
    temporary = file.with_name(f".tmp-{file.name}")
    temporary.write_text(text)
    temporary.replace(file)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder against other processes. Raises MesetaError if another one has locked it.

    Does nothing on a file system whose folders cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise MesetaError(f"{str(folder)!r} is in use by another process; wait until it has ended") from None
    except OSError:
        pass  # NFS cannot lock folders.
    try:
        yield
    finally:
        os.close(descriptor)
