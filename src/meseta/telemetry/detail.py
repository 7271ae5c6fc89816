"""Amount of progress that a command prints."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from meseta.errors import MesetaError

if TYPE_CHECKING:
    from rich.console import Console

LIFE_SIGN_S = 60.0
"""Seconds without a line after which a log gets one."""


class Detail(enum.IntEnum):
    """Level of detail, including those below it."""

    QUIET = 0
    """Errors, warnings and results."""
    NORMAL = 1
    """Evaluations, phases and trials, and a bar on a terminal."""
    VERBOSE = 2
    """A line per logged step."""


class CurrentDetail:
    """Level of this process."""

    level = Detail.NORMAL

    @classmethod
    def choose(cls, command: str, *, quiet: bool, verbose: bool) -> None:
        """Set the level. Raises MesetaError if the options contradict each other."""
        if quiet and verbose:
            raise MesetaError(f"{command}: --quiet and --verbose contradict each other; omit one of them")
        cls.level = Detail.QUIET if quiet else Detail.VERBOSE if verbose else Detail.NORMAL

    @classmethod
    def is_quiet(cls) -> bool:
        """Whether the level is QUIET."""
        return cls.level == Detail.QUIET


def can_redraw(console: Console) -> bool:
    """Whether a console can redraw its lines. Logs and notebooks cannot, although FORCE_COLOR may be set there."""
    return console.is_interactive and console.file.isatty()


class LifeSignTimer:
    """Time since the last printed line."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart at a printed line."""
        self._line_at_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last line is LIFE_SIGN_S old."""
        return time.monotonic() - self._line_at_s >= LIFE_SIGN_S
