"""Names of checkpoint folders."""

from __future__ import annotations

from meseta.system.remote import Location

# A quarantined checkpoint is not loaded, counted or deleted, until a new checkpoint of its step replaces it.
QUARANTINE_MARKER = "quarantined.txt"
"""File in the folder of a quarantined checkpoint, with the reason. The checkpoint is damaged or needs a damaged
file."""
QUARANTINE_MARKERS = (QUARANTINE_MARKER, "passed-over.txt")
"""Names of files that mark a quarantined checkpoint. Earlier versions wrote the second one."""


def checkpoint_path(parent: Location, step: int) -> Location:
    """Return the location of the checkpoint of a step, such as 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """Return the folder name for a step, such as 'step-000000500'."""
    return f"step-{step:09d}"


def parse_step(path: Location) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(path.name.rpartition("-")[2])
