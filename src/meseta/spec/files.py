"""Files that commands and objects write: whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from meseta.spec.errors import MesetaError


def check_place(path: str | Path) -> None:
    """Raise MesetaError, before a long command begins, where `path` cannot become a file."""
    path = Path(path)
    if path.is_dir():
        raise MesetaError(f"{str(path)!r} is a folder; name a file")
    if path.exists() and not path.is_file():
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise MesetaError(f"{str(path)!r} cannot be written: its folder does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise MesetaError(f"{str(path)!r} cannot be written: its folder takes no new files; name another")


def write_whole(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8, so that a reader, an interruption or a full disk finds the old file or the new one.

    A link keeps its place, and the file that it names is replaced. What is no plain file, such as /dev/stdout, is
    written to as it stands. Characters that UTF-8 does not have become question marks. Raises MesetaError where the
    file cannot be written, and leaves the former one.
    """
    check_place(path)
    place, content = Path(path).resolve(), text.encode("utf-8", errors="replace")
    # Runs delete what ends like this in their folder, should a kill leave it there.
    unfinished = place.with_name(f".meseta-{os.getpid()}.tmp")
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)
            return
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, place)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise MesetaError(f"{str(path)!r} cannot be written: {reason}; choose another") from None
        raise
