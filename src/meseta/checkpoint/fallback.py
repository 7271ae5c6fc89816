"""Fallback from a damaged checkpoint to the newest intact one before it."""

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
from meseta.spec import MesetaError
from meseta.system.remote import Location

# Number of unusable checkpoints that a message names in addition to the first one.
_MAX_LISTED = 4


class FallbackCheckpointError(DamagedCheckpoint):
    """Damage of a checkpoint, with the checkpoint from which the run can resume instead."""

    problem: str
    fallback: Location | None
    """Newest older checkpoint whose files are all intact. `None` if there is none."""
    unusable: tuple[Location, ...]
    """The damaged checkpoint and all between it and the fallback, newest first. All are damaged or need a damaged
    file."""


def fallback_checkpoint_error(problem: DamagedCheckpoint, path: Location) -> FallbackCheckpointError:
    """Find the newest intact checkpoint before `path`, and return an error that says how to resume from it.

    Raises StorageError if a read fails, because an unreadable checkpoint may be intact.
    """
    passed, damaged = [path], {_resolve_links(file) for file in problem.files}
    for other in reversed([other for other in list_candidates(path.parent) if parse_step(other) < parse_step(path)]):
        try:
            # Reads only the manifest of checkpoints that need a file already known to be damaged.
            _check_not_damaged(other, damaged)
            verify(other)
        except DamagedCheckpoint as another:
            damaged |= {_resolve_links(file) for file in another.files}
        except StorageError as unread:
            raise StorageError(f"{problem}; search for an older one failed: {unread}") from None
        except MesetaError:
            pass
        else:
            return _make_error(problem, other, passed)
        passed.append(other)
    return _make_error(problem, None, passed)


def _check_not_damaged(path: Location, damaged: Collection[Location]) -> None:
    for entry in file_entries(read_manifest(path)):
        if _resolve_links(resolve_file(path, entry["path"])) in damaged:
            raise DamagedCheckpoint(f"checkpoint {str(path)!r} needs {entry['path']!r}, which is damaged")


def _make_error(problem: DamagedCheckpoint, path: Location | None, passed: list[Location]) -> FallbackCheckpointError:
    if path is None:
        offer = FallbackCheckpointError(f"{problem}; no older checkpoint in its folder is intact")
    else:
        first, *remaining = passed
        more = [repr(other.name) for other in remaining[:_MAX_LISTED]]
        more += [f"{len(remaining) - _MAX_LISTED:,} more"] * (len(remaining) > _MAX_LISTED)
        likewise = (
            f", and the same for {' and '.join(filter(None, [', '.join(more[:-1]), *more[-1:]]))}" if more else ""
        )
        way = f"after `mv {first} {first}.damaged`{likewise}"
        if not isinstance(first, Path):  # Object stores have no rename.
            way = "with checkpoint.resume=older"
        offer = FallbackCheckpointError(f"{problem}: {str(path)!r} is intact; the same command resumes from it {way}")
    offer.problem, offer.fallback, offer.unusable = str(problem), path, tuple(passed)
    return offer


def _resolve_links(file: Location) -> Location:
    return Path(os.path.realpath(file)) if isinstance(file, Path) else file
