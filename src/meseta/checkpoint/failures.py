"""Repeated reads for a run that selects the checkpoint to resume from by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from meseta.checkpoint.files.paths import QUARANTINE_MARKER, split_path
from meseta.comm import World
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.files import is_read_failure, resolve_inside
from meseta.system.remote import Location, location_exists

READ_RETRY_WINDOW_S = 10.0
"""Seconds for which failed reads are repeated inside `retry_reads`."""
_BACKOFF_S = 0.05, 1.0
"""Shortest and longest delay between two attempts."""
T = TypeVar("T")


class _RetryState:
    """State of this process, shared by the threads that read blocks."""

    window_s = 0.0
    has_timed_out = False


@contextmanager
def retry_reads() -> Iterator[None]:
    """Context manager in which this process repeats failed reads of checkpoints for `READ_RETRY_WINDOW_S`.

    A read that fails for this long raises StorageError, which explains how to set the checkpoint aside.
    """
    _RetryState.window_s, _RetryState.has_timed_out = READ_RETRY_WINDOW_S, False
    try:
        yield
    finally:
        _RetryState.window_s = 0.0


def retry(root: Location | None, attempt: Callable[[], T]) -> T:
    """Return the result of `attempt`, which reads a part of the checkpoint `root` and raises StorageError on
    failure. Repeats it only inside `retry_reads`."""
    end_s, (wait_s, longest_s) = time.monotonic() + _RetryState.window_s, _BACKOFF_S
    while True:
        try:
            return attempt()
        except StorageError as error:
            left_s = end_s - time.monotonic()
            if _RetryState.window_s == 0:
                raise
            # Other threads then fail immediately, so that the command ends.
            if left_s <= 0 or _RetryState.has_timed_out:
                _RetryState.has_timed_out = True
                raise StorageError(f"{error} (tried for {_RetryState.window_s:g} s){_set_aside_hint(root)}") from None
        time.sleep(min(wait_s, left_s))
        wait_s = min(2 * wait_s, longest_s)


def _set_aside_hint(root: Location | None) -> str:
    if root is None:
        return ""
    how = f"`mv {root} {root}.unread`" if isinstance(root, Path) else f"an empty file '{root}/{QUARANTINE_MARKER}'"
    return f", or set the checkpoint aside with {how}, to resume from an older one"


class DamagedCheckpoint(MesetaError):
    """Damage of a checkpoint. An older checkpoint may be intact."""

    files: frozenset[Location] = frozenset()
    """Files of the checkpoint that are known to be damaged or missing, without its manifest."""


def damaged_file_error(path: Location, what: str) -> DamagedCheckpoint:
    """Return the error for a damaged file. `what` states the problem and follows the path in the message."""
    problem = DamagedCheckpoint(f"checkpoint file {str(path)!r} {what}; copy the checkpoint again, or use an older one")
    problem.files = frozenset([path])
    return problem


def malformed_manifest_error(where: str, what: str) -> DamagedCheckpoint:
    """Return the error for a manifest, or a part of it, with invalid content. `what` states the problem."""
    return DamagedCheckpoint(f"{where} is malformed ({what}); use an older checkpoint")


def read_error(path: Location, error: OSError) -> MesetaError:
    """Return the error for a failed read of a checkpoint.

    It is DamagedCheckpoint if the file is missing or must not be read. Otherwise it is StorageError: the checkpoint may
    be intact, so the caller must not delete, replace or select a checkpoint because of this error.
    """
    if is_read_failure(error):
        name = error.filename if isinstance(error.filename, str) else str(path)
        reason = error.strerror or str(error)
        return StorageError(
            f"checkpoint file {name!r} cannot be read ({reason}); run the command again when it can be read"
        )
    return damaged_file_error(path, f"cannot be read ({error.strerror})")


@contextmanager
def wrap_read_errors(path: Location) -> Iterator[None]:
    """Context manager that converts an OSError to the error that `read_error` returns."""
    try:
        yield
    except OSError as error:
        raise read_error(path, error) from None


def read_with_retry(root: Location | None, path: Location, action: Callable[[], T]) -> T:
    """Return the result of `action`, which reads `path` of the checkpoint `root`. `root` is `None` for a folder of
    checkpoints.

    Repeats a failed read inside `retry_reads`. Raises the error that `read_error` returns.
    """

    def attempt() -> T:
        with wrap_read_errors(path):
            return action()

    return retry(root, attempt)


def has_file(root: Location, name: str) -> bool:
    """Whether the checkpoint at `root` has a file of this name. Raises StorageError if reading fails."""
    return read_with_retry(root, root / name, lambda: location_exists(root / name))


def locate_file(root: Location, entry: Mapping[str, Any]) -> Location:
    """Return the location of a file that a checked manifest names.

    Raises DamagedCheckpoint if the file is missing, not a regular file, outside its checkpoint because of a link, or
    has another size than the manifest states. Raises StorageError if reading fails.
    """
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
    """Check the files of all entries as `locate_file` does, and raise its errors."""
    if isinstance(root, Path):
        for entry in entries:
            locate_file(root, entry)
        return
    sizes: dict[str | None, dict[str, int]] = {}
    for entry in entries:
        folder, inner = split_path(entry["path"])
        if folder not in sizes:
            # List each folder once, instead of one request per file.
            holder = root if folder is None else root.parent / folder
            sizes[folder] = read_with_retry(root, holder, holder.files)
        if inner not in sizes[folder]:
            raise damaged_file_error(root / entry["path"], "cannot be read (No such file)")
        _check_size(root / entry["path"], entry["num_bytes"], sizes[folder][inner])


def _check_size(path: Location, expected_bytes: int, found_bytes: int) -> None:
    if found_bytes != expected_bytes:
        raise damaged_file_error(path, f"must have {expected_bytes} bytes, but has {found_bytes}")


def concurrent_writer_error(path: Location) -> MesetaError:
    """Return the error for a file or checkpoint at a URL that another process created or changed during a save."""
    return MesetaError(
        f"checkpoint {str(path)!r} was written by another run; stop that run, or choose another checkpoint.dir"
    )


def check_no_concurrent_saves(checkpoints: Iterable[Location], known_names: Collection[str] | None) -> None:
    """Raise MesetaError if a checkpoint is not in `known_names`, as another run has saved it. `None` allows all."""
    for path in checkpoints:
        if known_names is not None and path.name not in known_names:
            raise concurrent_writer_error(path)


def check_checksum(path: Location, expected: str, actual: str) -> None:
    """Raise DamagedCheckpoint if the checksum of a file differs from the one in the manifest."""
    if actual != expected:
        raise damaged_file_error(path, f"must have the checksum {expected}, but its content has {actual}")


@contextmanager
def wrap_write_errors(path: Location) -> Iterator[None]:
    """Context manager that converts an OSError of a write, such as a full disk, to MesetaError with the name of the
    file.

    At a URL, an existing file means that another run writes there.
    """
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
    """Run `action` on each rank and return its result. If it fails on any rank, raises MesetaError on all ranks."""
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
    except DamagedCheckpoint as damage:  # It is raised on all ranks, so all reach the gather.
        damaged_files = error.files if isinstance(error, DamagedCheckpoint) else damage.files
        damage.files = frozenset(file for files in world.all_gather_object(damaged_files) for file in files)
        raise
    return result


def run_on_rank_0(world: World, action: Callable[[], object]) -> None:
    """Run `action` on rank 0. If it fails, raises MesetaError on all ranks."""
    run_on_all_ranks(world, action if world.rank == 0 else lambda: None)
