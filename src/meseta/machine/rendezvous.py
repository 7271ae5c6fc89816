"""Where the ranks of one machine meet: in a file without a name, and on sockets of loopback alone. No torch here."""

from __future__ import annotations

import socket
from types import TracebackType

from meseta.machine.files import anonymous_file

RENDEZVOUS_VARIABLE = "MESETA_RENDEZVOUS"
"""Names the file to a rank. Where it is not set, torchrun's variables, or the user's, say where the others are."""
LOOPBACK_INTERFACE_INDEX = 1
"""Number of the loopback interface, whatever its name: the first that a system makes."""


class Rendezvous:
    """A place where processes of this machine become the ranks of one group; a context manager around their start.

    It is a file that lies in no folder. Each rank inherits it as an open descriptor and makes torch's FileStore of it:
    nothing listens for ranks, nobody else can come in, no port has to be free, and nothing is left behind.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._file = anonymous_file("meseta-rendezvous")

    @property
    def descriptor(self) -> int:
        """What a rank inherits: `pass_fds` of its subprocess."""
        return self._file.fileno()

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank finds in its environment, in the words of torchrun."""
        loopback = _loopback()
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            RENDEZVOUS_VARIABLE: f"/proc/self/fd/{self.descriptor}",
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": f"={loopback}",  # nccl takes a name alone for the beginning of names
        }

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _loopback() -> str:
    try:
        return socket.if_indextoname(LOOPBACK_INTERFACE_INDEX)
    except OSError:  # a system that tells no names
        return "lo"
