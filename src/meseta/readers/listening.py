"""Where dispatchers and readers listen, and whom they let in: on this machine alone, unless there are keys."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import flight

from meseta.data.read.served.keys import HEADER, ServerKeys
from meseta.errors import one_line, shown
from meseta.machine.remote import ENCRYPTED, PLAIN
from meseta.spec import MesetaError

MOST_CALLS = 4096
"""Calls that are answered at a time: each rank has a stream for each window that it asks for ahead."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server listens, and how it is reached."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    reached_as: str = "127.0.0.1"
    """The host, as others call it."""
    keys: ServerKeys | None = None

    @property
    def scheme(self) -> str:
        return PLAIN if self.keys is None else ENCRYPTED

    @staticmethod
    def of(listen: str, advertise: str | None = None, keys: Path | None = None) -> Endpoint:
        """From options of a command. Raises MesetaError for what is no HOST:PORT, an address that others reach without
        keys, and keys that do not cover the host."""
        host, sign, port = listen.rpartition(":")
        if not (sign and host and ":" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise MesetaError(f"readers: --listen is HOST:PORT, such as 127.0.0.1:7077, got {shown(listen)}")
        host = "127.0.0.1" if host == "localhost" else host
        if keys is None:
            if not _is_own(host):
                raise MesetaError(
                    f"readers: --listen {shown(listen)}: others reach it, and without keys it must be 127.0.0.1; make "
                    "some with `meseta readers keys DIR`, and give --keys DIR"
                )
            return Endpoint(host=host, port=int(port), reached_as=advertise or host)
        reached_as = advertise or (socket.gethostname() if _is_every(host) else host)
        loaded = ServerKeys.load(keys)
        loaded.check_host(reached_as)
        return Endpoint(host=host, port=int(port), reached_as=reached_as, keys=loaded)


def _is_own(host: str) -> bool:
    """Whether it is an address that no other machine reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_every(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


class Doorkeeper(flight.ServerMiddlewareFactory):
    """Lets calls with the token in, and not too many at a time, before what they ask is read."""

    def __init__(self, keys: ServerKeys | None) -> None:
        self._header = None if keys is None else keys.header().encode()
        self._num_calls = 0
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> flight.ServerMiddleware:
        """Raises the error that the caller is told."""
        shown_header = next(iter(headers.get(HEADER, ())), "")
        sent = shown_header if isinstance(shown_header, bytes) else shown_header.encode()
        if self._header is not None and not hmac.compare_digest(sent, self._header):
            raise flight.FlightUnauthenticatedError(f"a call has {HEADER}: Bearer TOKEN, and the TOKEN of these keys")
        with self._lock:
            if self._num_calls >= MOST_CALLS:
                raise flight.FlightServerError(f"{MOST_CALLS:,} calls are being answered, the most at a time")
            self._num_calls += 1
        return _CountedCall(self)

    def leave(self) -> None:
        """A call has ended."""
        with self._lock:
            self._num_calls -= 1


class _CountedCall(flight.ServerMiddleware):
    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    def call_completed(self, exception: Exception | None) -> None:
        self._doorkeeper.leave()


class OwnServer(flight.FlightServerBase):
    """A server at an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        options: dict[str, Any] = {"middleware": {"doorkeeper": Doorkeeper(endpoint.keys)}}
        if endpoint.keys is not None:
            # Who has no certificate is refused before a byte of a message is taken: gRPC reads one whole, however
            # large, before it asks anybody what to do with it.
            options |= {
                "tls_certificates": [(endpoint.keys.certificate, endpoint.keys.key)],
                "verify_client": True,
                "root_certificates": endpoint.keys.client,
            }
        super().__init__(f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}", **options)
        self.url = f"{endpoint.scheme}://{endpoint.reached_as}:{self.port}"
        """Where it is reached."""

    def end(self) -> None:
        """Serve nobody any more."""
        self.shutdown()


Server = TypeVar("Server", bound=OwnServer)


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
