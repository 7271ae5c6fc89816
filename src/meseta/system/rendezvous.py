"""Rendezvous of the ranks of one machine through an unnamed file. Ranks communicate over loopback. Needs no torch."""

from __future__ import annotations

import socket
from types import TracebackType

from meseta.system.files import anonymous_file

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
