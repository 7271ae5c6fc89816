"""What checkpoints are called where they lie."""

from __future__ import annotations

from meseta.machine.remote import Location

QUARANTINE_MARKER = "passed-over.txt"
"""In the folder of a checkpoint that is damaged, or needs a file that is, and that a run has gone back behind: it is
taken up, counted and deleted no more, until a new one of its step takes its place. Says why."""


def checkpoint_path(parent: Location, step: int) -> Location:
    """Where the checkpoint of a step is, for example 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """For example 'step-000000500'."""
    return f"step-{step:09d}"


def parse_step(path: Location) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])
