"""The way back from a damaged checkpoint: the newest one before it that is whole."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.loading import verify
from meseta.checkpoint.manifest import file_entries, read_manifest
from meseta.checkpoint.store.names import parse_step
from meseta.checkpoint.store.references import resolve_file
from meseta.checkpoint.store.store import list_candidates
from meseta.errors import StorageError
from meseta.machine.remote import Location
from meseta.spec import MesetaError

_MAX_LISTED = 4
"""Checkpoints to be moved away that a message names, beside the first."""


class FallbackCheckpointError(DamagedCheckpoint):
    """A damaged checkpoint, and what to go on with."""

    problem: str
    """What is wrong with it."""
    fallback: Location | None
    """The newest checkpoint before it every byte of which is whole; None where there is none."""
    unusable: tuple[Location, ...]
    """The damaged one and those between, the newest first: they are damaged, or need a file that is."""


def fallback_checkpoint_error(problem: DamagedCheckpoint, path: Location) -> FallbackCheckpointError:
    """The same error with the newest checkpoint before `path` whose every byte is whole, and how to go on from it.

    Of those that need a file which is known to be damaged, the manifest alone is read. Raises StorageError where a read
    fails: what cannot be read may be whole.
    """
    passed, damaged = [path], {_resolve_links(file) for file in problem.files}
    for other in reversed([other for other in list_candidates(path.parent) if parse_step(other) < parse_step(path)]):
        try:
            _check_not_damaged(other, damaged)
            verify(other)
        except DamagedCheckpoint as another:
            damaged |= {_resolve_links(file) for file in another.files}
        except StorageError as unread:
            raise StorageError(f"{problem}; looking for one: {unread}") from None
        except MesetaError:
            pass
        else:
            return _make_error(problem, other, passed)
        passed.append(other)
    return _make_error(problem, None, passed)


def _check_not_damaged(path: Location, damaged: Collection[Location]) -> None:
    """Raise DamagedCheckpoint where a checkpoint needs one of these files."""
    for entry in file_entries(read_manifest(path)):
        if _resolve_links(resolve_file(path, entry["path"])) in damaged:
            raise DamagedCheckpoint(f"checkpoint {str(path)!r} needs {entry['path']!r}, which is damaged")


def _make_error(problem: DamagedCheckpoint, path: Location | None, passed: list[Location]) -> FallbackCheckpointError:
    if path is None:
        offer = FallbackCheckpointError(f"{problem}; no older one beside it is whole")
    else:
        first, *others = passed
        more = [repr(other.name) for other in others[:_MAX_LISTED]]
        more += [f"{len(others) - _MAX_LISTED:,} more"] * (len(others) > _MAX_LISTED)
        likewise = f", and likewise of {' and '.join(filter(None, [', '.join(more[:-1]), *more[-1:]]))}" if more else ""
        way = f"after `mv {first} {first}.damaged`{likewise}"
        if not isinstance(first, Path):  # a store has no names to change
            way = "with checkpoint.resume=older"
        offer = FallbackCheckpointError(f"{problem}: {str(path)!r} is whole, and the same command takes it {way}")
    offer.problem, offer.fallback, offer.unusable = str(problem), path, tuple(passed)
    return offer


def _resolve_links(file: Location) -> Location:
    """The same whatever links lead there."""
    return Path(os.path.realpath(file)) if isinstance(file, Path) else file
