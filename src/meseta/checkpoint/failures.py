"""How a file that cannot be trusted, or written, is reported; and one rank's failure is every rank's: nobody is left
waiting in a collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from meseta.checkpoint.files.paths import split_path
from meseta.checkpoint.retries import retry
from meseta.comm import World
from meseta.errors import StorageError
from meseta.machine.files import is_read_failure, resolve_inside
from meseta.machine.remote import Location, location_exists
from meseta.spec import MesetaError

T = TypeVar("T")


class DamagedCheckpoint(MesetaError):
    """A checkpoint that is not what was saved; an older one may be."""

    files: frozenset[Location] = frozenset()
    """Those of it that are known to be damaged or missing, beside its manifest."""


def damaged_file_error(path: Location, what: str) -> DamagedCheckpoint:
    """The error that names a file and what is wrong with it."""
    problem = DamagedCheckpoint(f"checkpoint file {str(path)!r} {what}; copy the checkpoint again, or use an older one")
    problem.files = frozenset([path])
    return problem


def malformed_manifest_error(where: str, what: str) -> DamagedCheckpoint:
    """The error that names a manifest, or a part of it, and what it must not say."""
    return DamagedCheckpoint(f"{where} is malformed ({what}); use an older checkpoint")


def read_error(path: Location, error: OSError) -> MesetaError:
    """Return the error for a read of a checkpoint that raised `error`.

    It is DamagedCheckpoint if the file is missing or must not be read. Otherwise it is StorageError: whether the
    checkpoint is damaged is unknown, and nothing may be deleted, replaced or chosen because of it.
    """
    if is_read_failure(error):
        name = error.filename if isinstance(error.filename, str) else str(path)
        reason = error.strerror or str(error)
        return StorageError(f"checkpoint file {name!r} cannot be read ({reason}); run the command again once it can")
    return damaged_file_error(path, f"cannot be read ({error.strerror})")


@contextmanager
def wrap_read_errors(path: Location) -> Iterator[None]:
    """Context manager that turns an OSError into `read_error`."""
    try:
        yield
    except OSError as error:
        raise read_error(path, error) from None


def read_with_retry(root: Location | None, path: Location, action: Callable[[], T]) -> T:
    """Return what `action` reads of `path`, a part of the checkpoint `root`; `None` for a folder of checkpoints.

    A failed read is repeated inside `retry_reads`. Raises what `read_error` returns.
    """

    def attempt() -> T:
        with wrap_read_errors(path):
            return action()

    return retry(root, attempt)


def has_file(root: Location, name: str) -> bool:
    """Whether the checkpoint at `root` has a file of this name. Raises StorageError if that cannot be told."""
    return read_with_retry(root, root / name, lambda: location_exists(root / name))


def locate_file(root: Location, entry: Mapping[str, Any]) -> Location:
    """Where the file of an entry in a checked manifest is. Raises DamagedCheckpoint where it is missing, no regular
    file, led out of its checkpoint by a link, or of another size than the manifest says; StorageError where that cannot
    be told."""
    path = root / entry["path"]
    folder, inner = split_path(entry["path"])
    if not isinstance(root, Path) or not isinstance(path, Path):
        found_bytes = read_with_retry(root, path, path.num_bytes)
    else:
        holder = root
        if folder is not None:
            holder = read_with_retry(root, root, lambda: Path(os.path.realpath(root, strict=True))).parent / folder
            path = holder / inner
        found_bytes = read_with_retry(root, path, lambda: resolve_inside(holder, inner).stat().st_size)
    _check_size(path, entry["num_bytes"], found_bytes)
    return path


def check_files(root: Location, entries: Iterable[Mapping[str, Any]]) -> None:
    """Raise what `locate_file` raises for any of the entries; at a URL, each folder is listed once."""
    if isinstance(root, Path):
        for entry in entries:
            locate_file(root, entry)
        return
    sizes: dict[str | None, dict[str, int]] = {}
    for entry in entries:
        folder, inner = split_path(entry["path"])
        if folder not in sizes:
            holder = root if folder is None else root.parent / folder
            sizes[folder] = read_with_retry(root, holder, holder.files)
        if inner not in sizes[folder]:
            raise damaged_file_error(root / entry["path"], "cannot be read (No such file)")
        _check_size(root / entry["path"], entry["num_bytes"], sizes[folder][inner])


def _check_size(path: Location, expected_bytes: int, found_bytes: int) -> None:
    if found_bytes != expected_bytes:
        raise damaged_file_error(path, f"must have {expected_bytes} bytes, but has {found_bytes}")


def concurrent_writer_error(path: Location) -> MesetaError:
    """The error of a file, or a checkpoint, at a URL, which is there, or has changed, while one of its name is
    written."""
    return MesetaError(
        f"checkpoint {str(path)!r} is another run's, which has written there; stop that one, or choose another "
        "checkpoint.dir"
    )


def check_no_concurrent_saves(checkpoints: Iterable[Location], known_names: Collection[str] | None) -> None:
    """Raise MesetaError if a checkpoint has none of the `known_names` names: another run has saved it. `None` allows
    all."""
    for path in checkpoints:
        if known_names is not None and path.name not in known_names:
            raise concurrent_writer_error(path)


def check_checksum(path: Location, expected: str, found: str) -> None:
    """Raise MesetaError when the content of a file has another digest than the manifest says."""
    if found != expected:
        raise damaged_file_error(path, f"must have the checksum {expected}, but its content has {found}")


@contextmanager
def wrap_write_errors(path: Location) -> Iterator[None]:
    """Raise MesetaError, naming the file, where the system refuses to write it, for example on a full disk, and where
    there is one at a URL."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError) and not isinstance(path, Path):
            raise concurrent_writer_error(path) from None
        raise MesetaError(
            f"checkpoint file {str(path)!r} cannot be written: {error.strerror or error}; "
            "make room there, keep fewer checkpoints, or choose another directory"
        ) from None


def run_on_all_ranks(world: World, action: Callable[[], T]) -> T:
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
        world.raise_on_all_ranks(error)
    except DamagedCheckpoint as told:  # on all ranks alike
        own = error.files if isinstance(error, DamagedCheckpoint) else told.files
        told.files = frozenset(file for files in world.all_gather_object(own) for file in files)
        raise
    return result


def run_on_rank_0(world: World, action: Callable[[], object]) -> None:
    """Run `action` on rank 0 alone; when it fails there, raise MesetaError on all ranks."""
    run_on_all_ranks(world, action if world.rank == 0 else lambda: None)
