"""What checkpoints are called where they lie."""

from __future__ import annotations

from meseta.machine.remote import Location


def checkpoint_path(parent: Location, step: int) -> Location:
    """Where the checkpoint of a step is, for example 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """For example 'step-000000500'."""
    return f"step-{step:09d}"


def named_step(path: Location) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])
