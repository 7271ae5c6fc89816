"""Rank of this process, read from torchrun's environment variables. Needs neither torch nor a process group.

All functions raise MesetaError if a variable is not an integer.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType

from meseta.errors import MesetaError
from meseta.system.environment_variables import environ
from meseta.system.files import anonymous_file


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


RENDEZVOUS_VARIABLE = "MESETA_RENDEZVOUS"
"""Environment variable with the path of the rendezvous file. If it is not set, ranks use torchrun's variables."""
# Loopback is the first interface that a system creates. Its name differs between systems.
LOOPBACK_INTERFACE_INDEX = 1


class Rendezvous:
    """Unnamed file through which processes of this machine form a process group.

    Each rank inherits the file as an open descriptor and uses it for torch's FileStore. Exit the context manager after
    starting the ranks.
    """

    # No process listens on a port, other users cannot connect, and no file has to be removed.

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._file = anonymous_file("meseta-rendezvous")

    @property
    def descriptor(self) -> int:
        """Descriptor that each rank has to inherit, for example with `pass_fds` of `start_program`."""
        return self._file.fileno()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank, which include those of torchrun."""
        loopback = _loopback()
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            RENDEZVOUS_VARIABLE: f"/proc/self/fd/{self.descriptor}",
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": f"={loopback}",  # Without "=", NCCL treats the name as a prefix.
        }

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _loopback() -> str:
    try:
        return socket.if_indextoname(LOOPBACK_INTERFACE_INDEX)
    except OSError:  # The system does not report interface names.
        return "lo"
