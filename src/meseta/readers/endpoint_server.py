"""Where dispatchers and readers listen, and whom they let in: whoever shows the token, on this machine alone unless
there are keys."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import flight

from meseta.data.read.served.credentials import TOKEN_HEADER, Credentials, PortToken
from meseta.data.read.served.keys import TlsServerKeys
from meseta.errors import error_summary, format_value
from meseta.machine.remote import ENCRYPTED_SCHEME, PLAIN_SCHEME, check_reachable, is_loopback
from meseta.spec import MesetaError

MAX_CALLS = 4096
"""Calls that are answered at a time: each rank has a stream for each window that it asks for ahead."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server listens, and how it is reached."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    advertised_host: str = "127.0.0.1"
    """The host, as others call it."""
    credentials: Credentials | None = None
    """What callers show, `TlsServerKeys` to encrypt; `None` makes a token for the port, stored for callers of this
    user."""

    @property
    def keys(self) -> TlsServerKeys | None:
        return self.credentials if isinstance(self.credentials, TlsServerKeys) else None

    @property
    def scheme(self) -> str:
        return PLAIN_SCHEME if self.keys is None else ENCRYPTED_SCHEME

    @staticmethod
    def from_options(
        listen: str, advertise: str | None = None, keys: Path | None = None, credentials: Credentials | None = None
    ) -> Endpoint:
        """From options of a command; `credentials`: those without keys. Raises MesetaError for what is no HOST:PORT, an
        address that others reach without keys, and keys that do not cover the host."""
        host, sign, port = listen.rpartition(":")
        if not (sign and host and ":" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise MesetaError(f"readers: --listen is HOST:PORT, such as 127.0.0.1:7077, got {format_value(listen)}")
        host = "127.0.0.1" if host == "localhost" else host
        if keys is None:
            if not is_loopback(host):
                raise MesetaError(
                    f"readers: --listen {format_value(listen)}: others reach it, and without keys it must be "
                    f"127.0.0.1; make "
                    "some with `meseta readers keys DIR`, and give --keys DIR"
                )
            check_reachable(f"{PLAIN_SCHEME}://{advertise or host}:1", has_keys=False)
            return Endpoint(host=host, port=int(port), advertised_host=advertise or host, credentials=credentials)
        reached_as = advertise or (socket.gethostname() if _is_wildcard(host) else host)
        loaded = TlsServerKeys.load(keys)
        loaded.check_host(reached_as)
        return Endpoint(host=host, port=int(port), advertised_host=reached_as, credentials=loaded)


def _is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


class AdmissionMiddlewareFactory(flight.ServerMiddlewareFactory):
    """Lets calls with the token in, and not too many at a time, before what they ask is read."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.credentials = credentials
        """`None` refuses every call."""
        self._num_calls = 0
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> flight.ServerMiddleware:
        """Raises the error that the caller is told."""
        shown_header = next(iter(headers.get(TOKEN_HEADER, ())), "")
        sent = shown_header if isinstance(shown_header, bytes) else shown_header.encode()
        if not self._has_valid_token(sent):
            raise flight.FlightUnauthenticatedError(
                f"a call has {TOKEN_HEADER}: Bearer TOKEN, and the TOKEN of this service"
            )
        with self._lock:
            if self._num_calls >= MAX_CALLS:
                raise flight.FlightServerError(f"{MAX_CALLS:,} calls are being answered, the most at a time")
            self._num_calls += 1
        return _CountedCall(self)

    def _has_valid_token(self, header: bytes) -> bool:
        with suppress(MesetaError):  # the token is not stored yet
            return self.credentials is not None and hmac.compare_digest(
                header, self.credentials.header_value().encode()
            )
        return False

    def release(self) -> None:
        """A call has ended."""
        with self._lock:
            self._num_calls -= 1


class _CountedCall(flight.ServerMiddleware):
    def __init__(self, doorkeeper: AdmissionMiddlewareFactory) -> None:
        self._factory = doorkeeper

    def call_completed(self, exception: Exception | None) -> None:
        self._factory.release()


class EndpointServer(flight.FlightServerBase):
    """A server at an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises MesetaError if its token cannot be stored."""
        credentials = endpoint.credentials
        if credentials is None and endpoint.port:  # before anybody is refused who waits for this server
            credentials = PortToken(endpoint.port).store()
        doorkeeper = AdmissionMiddlewareFactory(credentials)
        options: dict[str, Any] = {"middleware": {"doorkeeper": doorkeeper}}
        if endpoint.keys is not None:
            # Who has no certificate is refused before a byte of a message is taken: gRPC reads one whole, however
            # large, before it asks anybody what to do with it.
            options |= {
                "tls_certificates": [(endpoint.keys.certificate, endpoint.keys.key)],
                "verify_client": True,
                "root_certificates": endpoint.keys.client,
            }
        super().__init__(f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}", **options)
        self.url = f"{endpoint.scheme}://{endpoint.advertised_host}:{self.port}"
        """Where it is reached."""
        self.credentials = doorkeeper.credentials = credentials or PortToken(self.port).store()

    def stop(self) -> None:
        """Serve nobody any more."""
        self.shutdown()


Server = TypeVar("Server", bound=EndpointServer)


@contextmanager
def run_server(make: Callable[[], Server], listen: str) -> Iterator[Server]:
    """A server while it is used. Raises MesetaError where it cannot listen there."""
    try:
        server = make()
    except (OSError, ValueError, flight.FlightError) as error:
        if isinstance(error, MesetaError):
            raise
        raise MesetaError(
            f"readers: cannot listen on {listen} ({error_summary(error)[:200]}); choose another port"
        ) from None
    try:
        yield server
    finally:
        server.stop()
