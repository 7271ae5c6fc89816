"""How a file that cannot be trusted, or written, is reported; and one rank's failure is every rank's: nobody is left
waiting in a collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from meseta.checkpoint.files.paths import split_path
from meseta.comm import World
from meseta.machine.files import inside
from meseta.spec import MesetaError


class DamagedCheckpoint(MesetaError):
    """A checkpoint that is not what was saved; an older one may be."""

    files: frozenset[Path] = frozenset()
    """Those of it that are known to be damaged or missing, beside its manifest."""


def broken_file(path: Path, what: str) -> DamagedCheckpoint:
    """The error that names a file and what is wrong with it."""
    problem = DamagedCheckpoint(f"checkpoint file {str(path)!r} {what}; copy the checkpoint again, or use an older one")
    problem.files = frozenset([path])
    return problem


def malformed(where: str, what: str) -> DamagedCheckpoint:
    """The error that names a manifest, or a part of it, and what it must not say."""
    return DamagedCheckpoint(f"{where} is malformed ({what}); use an older checkpoint")


def file_of(root: Path, entry: Mapping[str, Any]) -> Path:
    """Where the file of an entry in a checked manifest is. Raises MesetaError where it is missing, no regular file, led
    out of its checkpoint by a link, or of another size than the manifest says."""
    path, expected_bytes = root / entry["path"], entry["num_bytes"]
    folder, inner = split_path(entry["path"])
    try:
        if folder is not None:
            root = Path(os.path.realpath(root)).parent / folder
            path = root / inner
        found_bytes = inside(root, inner).stat().st_size
    except OSError as error:
        raise broken_file(path, f"cannot be read ({error.strerror})") from None
    if found_bytes != expected_bytes:
        raise broken_file(path, f"must have {expected_bytes} bytes, but has {found_bytes}")
    return path


def check_checksum(path: Path, expected: str, found: str) -> None:
    """Raise MesetaError when the content of a file has another digest than the manifest says."""
    if found != expected:
        raise broken_file(path, f"must have the checksum {expected}, but its content has {found}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise MesetaError, naming the file, where the system refuses to write it, for example on a full disk."""
    try:
        yield
    except OSError as error:
        raise MesetaError(
            f"checkpoint file {str(path)!r} cannot be written: {error.strerror or error}; "
            "make room there, keep fewer checkpoints, or choose another directory"
        ) from None


T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; when it fails on any, raise MesetaError on all."""
    error: Exception | None = None
    try:
        result = action()
    except OSError as caught:
        where = f" {caught.filename!r}" if caught.filename else ""
        error = MesetaError(f"checkpoint{where}: {caught.strerror or caught}; choose another directory")
    except Exception as caught:
        error = caught
    try:
        world.raise_together(error)
    except DamagedCheckpoint as told:  # on all ranks alike
        own = error.files if isinstance(error, DamagedCheckpoint) else told.files
        told.files = frozenset(file for files in world.gather_objects(own) for file in files)
        raise
    return result


def on_first(world: World, action: Callable[[], object]) -> None:
    """Run `action` on rank 0 alone; when it fails there, raise MesetaError on all ranks."""
    together(world, action if world.rank == 0 else lambda: None)
