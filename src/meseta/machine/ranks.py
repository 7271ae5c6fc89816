"""What this process is among its ranks, by the variables of torchrun, before there is a process group. No torch here.

All raise MesetaError where a variable is no number.
"""

from __future__ import annotations

import sys

from meseta.errors import MesetaError
from meseta.machine.variables import variables


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return rank_number() == 0


def rank_number() -> int:
    """Of this process; 0 where it is the only one."""
    return _number("RANK", 0)


def num_ranks() -> int:
    """Of all hosts together."""
    return _number("WORLD_SIZE", 1)


def note(text: str, *, by_all: bool = False) -> None:
    """A line on standard error, of the first rank alone, or of each that calls."""
    if by_all or is_first():
        print(f"note: {text}", file=sys.stderr, flush=True)


def local_rank() -> int:
    """Among those of this host."""
    return _number("LOCAL_RANK", 0)


def num_local_ranks() -> int:
    """On this host."""
    return _number("LOCAL_WORLD_SIZE", 1)


def is_launched() -> bool:
    """Whether it is one of several, which torchrun or `run_ranks` has started."""
    return "RANK" in variables and num_ranks() > 1


def _number(name: str, default: int) -> int:
    text = variables.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise MesetaError(
            f"the environment variable {name} is {text!r}, and must be a whole number, as torchrun sets it; unset it"
        ) from None
