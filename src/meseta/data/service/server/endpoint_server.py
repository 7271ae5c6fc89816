"""Base class of dispatchers and readers: listen address, authentication by token or TLS, and a limit of calls."""

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

from meseta.data.service.credentials import TOKEN_HEADER, Credentials, PortToken
from meseta.data.service.keys import TlsServerKeys
from meseta.errors import error_summary, format_value
from meseta.spec import MesetaError
from meseta.system.remote import ENCRYPTED_SCHEME, PLAIN_SCHEME, check_reachable, is_loopback

MAX_CALLS = 4096
"""Maximum number of concurrent calls. Each rank has one stream per window that it prefetches."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Listen address and credentials of a server."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on. 0 selects a free port."""
    advertised_host: str = "127.0.0.1"
    """Host name or address by which clients reach the server."""
    credentials: Credentials | None = None
    """Credentials that clients must present. `TlsServerKeys` encrypt connections. `None` stores a new token for the
    port, which programs of the same user can read."""

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
        """Create an endpoint from options of a command. `credentials` are used if there are no keys.

        Raises MesetaError if `listen` is not HOST:PORT, other machines can reach it and there are no keys, or the keys
        do not cover the host.
        """
        host, separator, port = listen.rpartition(":")
        if not (separator and host and ":" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise MesetaError(
                f"readers: --listen must be HOST:PORT, such as 127.0.0.1:7077, got {format_value(listen)}"
            )
        host = "127.0.0.1" if host == "localhost" else host
        if keys is None:
            if not is_loopback(host):
                raise MesetaError(
                    f"readers: the host of --listen must be 127.0.0.1 without keys, got {format_value(listen)}; create "
                    "keys with `meseta readers keys DIR`, and pass --keys DIR"
                )
            check_reachable(f"{PLAIN_SCHEME}://{advertise or host}:1", has_keys=False)
            return Endpoint(host=host, port=int(port), advertised_host=advertise or host, credentials=credentials)
        advertised_host = advertise or (socket.gethostname() if _is_wildcard(host) else host)
        loaded = TlsServerKeys.load(keys)
        loaded.check_host(advertised_host)
        return Endpoint(host=host, port=int(port), advertised_host=advertised_host, credentials=loaded)


def _is_wildcard(host: str) -> bool:
    """Whether the host is 0.0.0.0 or ::, which clients cannot connect to."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


class AdmissionMiddlewareFactory(flight.ServerMiddlewareFactory):
    """Middleware that rejects calls without a valid token or above `MAX_CALLS`, before their request is read."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.credentials = credentials
        """Expected credentials. `None` rejects all calls."""
        self._num_calls = 0
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> flight.ServerMiddleware:
        """Count an accepted call. Raises the error that the caller receives if the call is rejected."""
        header = next(iter(headers.get(TOKEN_HEADER, ())), "")
        sent = header if isinstance(header, bytes) else header.encode()
        if not self._has_valid_token(sent):
            raise flight.FlightUnauthenticatedError(
                f"the call must have the header {TOKEN_HEADER}: Bearer TOKEN, with the TOKEN of this service"
            )
        with self._lock:
            if self._num_calls >= MAX_CALLS:
                raise flight.FlightServerError(f"{MAX_CALLS:,} calls are in progress, the maximum of this server")
            self._num_calls += 1
        return _CountedCall(self)

    def _has_valid_token(self, header: bytes) -> bool:
        with suppress(MesetaError):  # The token is not stored yet.
            return self.credentials is not None and hmac.compare_digest(
                header, self.credentials.header_value().encode()
            )
        return False

    def release(self) -> None:
        """Count the end of a call."""
        with self._lock:
            self._num_calls -= 1


class _CountedCall(flight.ServerMiddleware):
    def __init__(self, doorkeeper: AdmissionMiddlewareFactory) -> None:
        self._factory = doorkeeper

    def call_completed(self, exception: Exception | None) -> None:
        self._factory.release()


class EndpointServer(flight.FlightServerBase):
    """Flight server that accepts calls with the credentials of its endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Start the server. Raises MesetaError if its token cannot be stored."""
        credentials = endpoint.credentials
        # Store the token before the port is open, so that no waiting client is rejected.
        if credentials is None and endpoint.port:
            credentials = PortToken(endpoint.port).store()
        doorkeeper = AdmissionMiddlewareFactory(credentials)
        options: dict[str, Any] = {"middleware": {"doorkeeper": doorkeeper}}
        if endpoint.keys is not None:
            # gRPC receives a whole message, however large, before it calls middleware. With client certificates,
            # unknown clients fail in the TLS handshake.
            options |= {
                "tls_certificates": [(endpoint.keys.certificate, endpoint.keys.key)],
                "verify_client": True,
                "root_certificates": endpoint.keys.client,
            }
        super().__init__(f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}", **options)
        self.url = f"{endpoint.scheme}://{endpoint.advertised_host}:{self.port}"
        """URL of the server for clients."""
        self.credentials = doorkeeper.credentials = credentials or PortToken(self.port).store()

    def stop(self) -> None:
        """Stop serving."""
        self.shutdown()


Server = TypeVar("Server", bound=EndpointServer)


@contextmanager
def run_server(make: Callable[[], Server], listen: str) -> Iterator[Server]:
    """Context manager that creates a server and stops it on exit. Raises MesetaError if it cannot listen."""
    try:
        server = make()
    except (OSError, ValueError, flight.FlightError) as error:
        if isinstance(error, MesetaError):  # A subclass of ValueError with a complete message.
            raise
        raise MesetaError(
            f"readers: cannot listen on {listen} ({error_summary(error)[:200]}); choose another port"
        ) from None
    try:
        yield server
    finally:
        server.stop()
