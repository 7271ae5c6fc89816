"""The way back from a damaged checkpoint: the newest one before it that is whole."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.loading import verify
from meseta.checkpoint.manifest import entries_of, read_manifest
from meseta.checkpoint.store.names import named_step
from meseta.checkpoint.store.needs import lies_at
from meseta.checkpoint.store.store import named
from meseta.errors import StorageError
from meseta.machine.remote import Location
from meseta.spec import MesetaError

_SHOWN = 4
"""Checkpoints to be moved away that a message names, beside the first."""


class OlderCheckpoint(DamagedCheckpoint):
    """A damaged checkpoint, and what to go on with."""

    problem: str
    """What is wrong with it."""
    path: Location | None
    """The newest checkpoint before it every byte of which is whole; None where there is none."""
    passed: tuple[Location, ...]
    """The damaged one and those between, the newest first: they are damaged, or need a file that is."""


def offer_older(problem: DamagedCheckpoint, path: Location) -> OlderCheckpoint:
    """The same error with the newest checkpoint before `path` whose every byte is whole, and how to go on from it.

    Of those that need a file which is known to be damaged, the manifest alone is read. Raises StorageError where a read
    fails: what cannot be read may be whole.
    """
    passed, damaged = [path], {_real(file) for file in problem.files}
    for other in reversed([other for other in named(path.parent) if named_step(other) < named_step(path)]):
        try:
            _check_needs(other, damaged)
            verify(other)
        except DamagedCheckpoint as another:
            damaged |= {_real(file) for file in another.files}
        except StorageError as unread:
            raise StorageError(f"{problem}; looking for one: {unread}") from None
        except MesetaError:
            pass
        else:
            return _offer(problem, other, passed)
        passed.append(other)
    return _offer(problem, None, passed)


def _check_needs(path: Location, damaged: Collection[Location]) -> None:
    """Raise DamagedCheckpoint where a checkpoint needs one of these files."""
    for entry in entries_of(read_manifest(path)):
        if _real(lies_at(path, entry["path"])) in damaged:
            raise DamagedCheckpoint(f"checkpoint {str(path)!r} needs {entry['path']!r}, which is damaged")


def _offer(problem: DamagedCheckpoint, path: Location | None, passed: list[Location]) -> OlderCheckpoint:
    if path is None:
        offer = OlderCheckpoint(f"{problem}; no older one beside it is whole")
    else:
        first, *others = passed
        more = [repr(other.name) for other in others[:_SHOWN]]
        more += [f"{len(others) - _SHOWN:,} more"] * (len(others) > _SHOWN)
        likewise = f", and likewise of {' and '.join(filter(None, [', '.join(more[:-1]), *more[-1:]]))}" if more else ""
        way = f"after `mv {first} {first}.damaged`{likewise}"
        if not isinstance(first, Path):  # a store has no names to change
            way = "with checkpoint.resume=older"
        offer = OlderCheckpoint(f"{problem}: {str(path)!r} is whole, and the same command takes it {way}")
    offer.problem, offer.path, offer.passed = str(problem), path, tuple(passed)
    return offer


def _real(file: Location) -> Location:
    """The same whatever links lead there."""
    return Path(os.path.realpath(file)) if isinstance(file, Path) else file
