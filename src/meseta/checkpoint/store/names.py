"""What checkpoints are called where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import overload

from meseta.machine.remote import Location, RemotePath


@overload
def checkpoint_path(parent: Path, step: int) -> Path: ...
@overload
def checkpoint_path(parent: RemotePath, step: int) -> RemotePath: ...
def checkpoint_path(parent: Location, step: int) -> Location:
    """Where the checkpoint of a step is, for example 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """For example 'step-000000500'."""
    return f"step-{step:09d}"


def named_step(path: Location) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])
