"""Files that commands write: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from meseta.spec import MesetaError


def check_place(path: Path) -> None:
    """Raise MesetaError, before a long command begins, where `path` cannot become a file."""
    if path.is_dir():
        raise MesetaError(f"{str(path)!r} is a folder; name a file")
    if not path.resolve().parent.is_dir():
        raise MesetaError(f"{str(path)!r}: its folder does not exist; make it first")
    if not os.access(path.resolve().parent, os.W_OK):
        raise MesetaError(f"{str(path)!r}: its folder cannot be written to; name another")


def write_whole(path: Path, text: str) -> None:
    """Write `text`, so that a reader, or an interruption, finds the old file or the new one. Raises MesetaError."""
    check_place(path)
    handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path.resolve())
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise MesetaError(f"{str(path)!r}: {error.strerror or error}") from None
        raise


def _umask() -> int:
    """Of this process, which the system tells only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
