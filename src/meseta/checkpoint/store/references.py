"""Files that checkpoints reference, in their own folders and in those of older checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meseta.checkpoint.failures import DamagedCheckpoint
from meseta.checkpoint.files.paths import split_path
from meseta.checkpoint.manifest import file_entries, read_manifest
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.remote import Location


def referenced_files(checkpoints: Iterable[Location]) -> set[Location] | None:
    """Return all files that the checkpoints need, or `None` if a later version wrote one of them, so that its files are
    unknown.

    Damaged checkpoints need no files. Raises StorageError if a manifest cannot be read, because any file may be needed.
    """
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
    """Return the location of a file that the manifest of the checkpoint at `path` names."""
    folder, inner = split_path(inner)
    if folder is None:
        return path / inner
    return path.with_name(folder) / inner if isinstance(path, Path) else path.parent / folder / inner
