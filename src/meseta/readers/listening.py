"""Where dispatchers and readers listen: on this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TypeVar

from pyarrow import flight

from meseta.errors import one_line, shown
from meseta.machine.remote import SCHEME
from meseta.spec import MesetaError


class OwnServer(flight.FlightServerBase):
    """A server of this machine."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.url = f"{location.rpartition(':')[0]}:{self.port}"
        """Where it is reached."""

    def end(self) -> None:
        """Serve nobody any more."""
        self.shutdown()


Server = TypeVar("Server", bound=OwnServer)


def location(listen: str) -> str:
    """The URL to listen on. Raises MesetaError for what is no HOST:PORT, and for an address that others reach."""
    host, sign, port = listen.rpartition(":")
    if not (sign and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise MesetaError(f"readers: --listen is HOST:PORT, such as 127.0.0.1:7077, got {shown(listen)}")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_own = ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own or ":" in host:
        raise MesetaError(
            f"readers: --listen {shown(listen)}: rows travel without encryption, and anybody who reaches the port may "
            "read them, so that it must be 127.0.0.1; reach it from another host through a tunnel of your own"
        )
    return f"{SCHEME}://{host}:{port}"


@contextmanager
def serving(make: Callable[[], Server], listen: str) -> Iterator[Server]:
    """A server while it is used. Raises MesetaError where it cannot listen there."""
    try:
        server = make()
    except (OSError, ValueError, flight.FlightError) as error:
        if isinstance(error, MesetaError):
            raise
        raise MesetaError(
            f"readers: cannot listen on {listen} ({one_line(error)[:200]}); choose another port"
        ) from None
    try:
        yield server
    finally:
        server.end()
