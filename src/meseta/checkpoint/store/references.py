"""Which files checkpoints need: their own, and those of older ones beside them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.files.paths import split_path
from meseta.checkpoint.manifest import file_entries, read_manifest
from meseta.errors import StorageError
from meseta.machine.remote import Location
from meseta.spec import MesetaError


def referenced_files(checkpoints: Iterable[Location]) -> set[Location] | None:
    """Files that these checkpoints need, their own and others'; None where one is of a later version, of which nobody
    here knows what it needs. A damaged one needs nothing any more. Raises StorageError if a manifest cannot be read:
    then any file may be needed."""
    needed: set[Location] = set()
    for path in checkpoints:
        try:
            needed |= {resolve_file(path, entry["path"]) for entry in file_entries(read_manifest(path))}
        except DamagedCheckpoint:
            continue
        except StorageError:
            raise
        except MesetaError:
            return None
    return needed


def resolve_file(path: Location, inner: str) -> Location:
    """Where a file of the checkpoint at `path` is, in the folder of all."""
    folder, inner = split_path(inner)
    if folder is None:
        return path / inner
    return path.with_name(folder) / inner if isinstance(path, Path) else path.parent / folder / inner
