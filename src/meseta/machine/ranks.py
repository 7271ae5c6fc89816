"""What this process is among its ranks, by the variables of torchrun, before there is a process group. No torch here.

All raise MesetaError where a variable is no number.
"""

from __future__ import annotations

import sys

from meseta.errors import MesetaError
from meseta.machine.environment_variables import environ


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return global_rank() == 0


def global_rank() -> int:
    """Of this process; 0 where it is the only one."""
    return _read_int("RANK", 0)


def num_ranks() -> int:
    """Of all hosts together."""
    return _read_int("WORLD_SIZE", 1)


def print_note(text: str, *, all_ranks: bool = False) -> None:
    """A line on standard error, of the first rank alone, or of each that calls."""
    if all_ranks or is_first_rank():
        print(f"note: {text}", file=sys.stderr, flush=True)


def local_rank() -> int:
    """Among those of this host."""
    return _read_int("LOCAL_RANK", 0)


def num_local_ranks() -> int:
    """On this host."""
    return _read_int("LOCAL_WORLD_SIZE", 1)


def is_distributed() -> bool:
    """Whether it is one of several, which torchrun or `run_ranks` has started."""
    return "RANK" in environ and num_ranks() > 1


def _read_int(name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise MesetaError(
            f"the environment variable {name} is {text!r}, and must be a whole number, as torchrun sets it; unset it"
        ) from None
