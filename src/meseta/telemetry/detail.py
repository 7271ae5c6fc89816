"""Amount of progress that a command prints, chosen by `--quiet` and `--verbose`."""

from __future__ import annotations

import enum
import time

from meseta.errors import MesetaError

LIFE_SIGN_S = 60.0
"""Seconds without a line after which a log gets one that shows progress."""


class Detail(enum.IntEnum):
    """Levels of detail. Each one includes those below it."""

    QUIET = 0
    """Errors, warnings and results."""
    NORMAL = 1
    """Evaluations, phases and trials, and a bar on a terminal."""
    VERBOSE = 2
    """A line per logged step."""


class CurrentDetail:
    """Level of detail of this process."""

    level = Detail.NORMAL

    @classmethod
    def choose(cls, command: str, *, quiet: bool, verbose: bool) -> None:
        """Set the level by the options of a command. Raises MesetaError if they contradict each other."""
        if quiet and verbose:
            raise MesetaError(f"{command}: --quiet and --verbose contradict each other; omit one of them")
        cls.level = Detail.QUIET if quiet else Detail.VERBOSE if verbose else Detail.NORMAL

    @classmethod
    def is_quiet(cls) -> bool:
        """Whether to print only errors, warnings and results."""
        return cls.level == Detail.QUIET


class LifeSignTimer:
    """Time since the last printed line."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Note that a line was printed."""
        self._line_at_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last line is LIFE_SIGN_S old."""
        return time.monotonic() - self._line_at_s >= LIFE_SIGN_S
