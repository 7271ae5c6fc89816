"""One rank's failure is every rank's: nobody is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meseta.comm import World
from meseta.spec import MesetaError

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; when it fails on any, raise MesetaError on all."""
    error: Exception | None = None
    try:
        result = action()
    except OSError as caught:
        where = f" {caught.filename!r}" if caught.filename else ""
        error = MesetaError(f"checkpoint{where}: {caught.strerror or caught}; choose another directory")
    except Exception as caught:
        error = caught
    world.raise_together(error)
    return result


def on_first(world: World, action: Callable[[], object]) -> None:
    """Run `action` on rank 0 alone; when it fails there, raise MesetaError on all ranks."""
    together(world, action if world.rank == 0 else lambda: None)
