"""Rank of this process, read from torchrun's environment variables. Needs neither torch nor a process group.

All functions raise MesetaError if a variable is not an integer.
"""

from __future__ import annotations

import sys

from meseta.errors import MesetaError
from meseta.system.environment_variables import environ


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return global_rank() == 0


def global_rank() -> int:
    """Return the rank of this process. It is 0 if this is the only process."""
    return _read_int("RANK", 0)


def num_ranks() -> int:
    """Return the number of ranks on all hosts."""
    return _read_int("WORLD_SIZE", 1)


def print_note(text: str, *, all_ranks: bool = False) -> None:
    """Print a note to standard error, by default on the first rank only."""
    if all_ranks or is_first_rank():
        print(f"note: {text}", file=sys.stderr, flush=True)


def local_rank() -> int:
    """Return the index of this rank among those of its host."""
    return _read_int("LOCAL_RANK", 0)


def num_local_ranks() -> int:
    """Return the number of ranks on this host."""
    return _read_int("LOCAL_WORLD_SIZE", 1)


def is_distributed() -> bool:
    """Whether torchrun or `run_ranks` has started this process as one of several ranks."""
    return "RANK" in environ and num_ranks() > 1


def _read_int(name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise MesetaError(
            f"environment variable {name} must be an integer, as set by torchrun, got {text!r}; unset it"
        ) from None
