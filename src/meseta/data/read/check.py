"""Reading that can be ended between two row groups."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[], None]
"""Called between pieces of work. It raises if nobody waits for the result any more."""


def unchecked() -> None:
    """Let work go on to its end."""
