"""What checkpoints are called where they lie."""

from __future__ import annotations

from meseta.machine.remote import Location

QUARANTINE_MARKER = "quarantined.txt"
"""File in the folder of a quarantined checkpoint: it is damaged, or needs a damaged file, and a run has resumed from an
older one. It is not loaded, counted or deleted until a new checkpoint of its step replaces it. The file says why."""
QUARANTINE_MARKERS = (QUARANTINE_MARKER, "passed-over.txt")
"""Files that mark a quarantined checkpoint. Earlier versions wrote the second one."""


def checkpoint_path(parent: Location, step: int) -> Location:
    """Where the checkpoint of a step is, for example 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """For example 'step-000000500'."""
    return f"step-{step:09d}"


def parse_step(path: Location) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])
