"""Connection to a dispatcher or a reader, and its errors."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from meseta.data.service.credentials import TOKEN_HEADER, Credentials, NoTokenError
from meseta.data.service.keys import TlsKeys, handshake_error_message, unknown_client_message
from meseta.data.service.messages import MAX_REASON_BYTES, ErrorStatus
from meseta.errors import MesetaError, StorageError, error_summary
from meseta.system.environment_variables import environ
from meseta.system.remote import ENCRYPTED_SCHEME, check_reachable, parse_address

# gRPC reads the variable when it starts. By default it would log every failed handshake.
environ.setdefault("GRPC_VERBOSITY", "NONE")

PROBE_TIMEOUT_S = 2.0
"""Timeout in seconds for finding out why a call failed."""
MAX_MESSAGE_CHARS = 300
"""Limit on the text of an Arrow Flight error, for the same reason as `MAX_REASON_BYTES`."""
CHANNEL_OPTIONS = [
    # gRPC servers close connections that send keepalive pings more often. A missing reply within the timeout ends the
    # connection, so that peers which disappeared are detected.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Reads of a megabyte take a seventh of the system calls of gRPC's default.
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
]
"""Options of gRPC channels: keepalive, reconnection and the size of reads."""


class UnreachableError(MesetaError):
    """No answer, or an incomplete one. A retry may succeed."""


def to_flight_error(error: Exception) -> flight.FlightServerError:
    """Return the error that a server raises, for `Connection.wrap_errors` at the client.

    If the server could not reach another process or its storage, another reader may succeed. If it found bad data, it
    sends an ErrorStatus.
    """
    meseta_error = error if isinstance(error, MesetaError) else MesetaError(error_summary(error))
    is_of_this_one = isinstance(error, UnreachableError | StorageError)
    # Without a status the client treats the error as one of this server only.
    status = b"" if is_of_this_one else ErrorStatus.of(meseta_error).to_bytes()
    return flight.FlightServerError(str(meseta_error)[:MAX_MESSAGE_CHARS], extra_info=status)


class Connection:
    """Thread-safe connection to a dispatcher or a reader. The first call establishes it."""

    def __init__(self, kind: str, url: str, credentials: Credentials) -> None:
        """Create a connection. `kind` is "dispatcher" or "reader".

        Raises MesetaError if the address is invalid or does not match the credentials. TLS keys require an encrypted
        address, and a token alone may only be sent to this machine.
        """
        self._keys = keys = credentials if isinstance(credentials, TlsKeys) else None
        check_reachable(url, has_keys=keys is not None)
        self.url, self._kind, self._credentials = url, kind, credentials
        self._context = _unverified_context() if keys is None else keys.client_context()
        tls = {}
        if keys is not None:
            tls = {"tls_root_certs": keys.certificate, "cert_chain": keys.client, "private_key": keys.client}
        self.client = flight.connect(url, generic_options=CHANNEL_OPTIONS, **tls)

    def __str__(self) -> str:
        return f"{self._kind} {self.url}"

    def call_options(self, timeout_s: float | None = None) -> flight.FlightCallOptions:
        """Return the options of a call with this timeout. Raises UnreachableError if no token is stored yet,
        MesetaError if others may read its file."""
        try:
            header = self._credentials.header_value()
        except NoTokenError as error:
            self._diagnose_failure()
            raise UnreachableError(f"{self} cannot be reached: {error}") from None
        return flight.FlightCallOptions(timeout=timeout_s, headers=[(TOKEN_HEADER.encode(), header.encode())])

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Context manager that converts errors of Arrow Flight.

        Raises the MesetaError that the server sent, a MesetaError for rejected credentials, or `UnreachableError`
        otherwise.
        """
        try:
            yield
        except flight.FlightServerError as error:
            if error.extra_info:
                raise self._told_by(error.extra_info) from None
            raise UnreachableError(f"{self} failed: {strip_flight_details(error)}") from None
        except flight.FlightUnauthenticatedError:
            raise MesetaError(self._credentials.rejection_message(str(self))) from None
        except (flight.FlightUnavailableError, flight.FlightTimedOutError):
            self._diagnose_failure()
            raise UnreachableError(f"{self} cannot be reached: it has not answered, or broke off") from None
        except (flight.FlightError, OSError, ValueError, RuntimeError) as error:  # Arrow maps gRPC codes to these.
            if isinstance(error, MesetaError):
                raise
            raise UnreachableError(f"{self} broke off: {strip_flight_details(error)}") from None

    def _told_by(self, extra_info: bytes) -> MesetaError:
        try:
            status = ErrorStatus.from_bytes(extra_info, str(self))
        except MesetaError:  # Senders of older versions send plain text.
            status = ErrorStatus(reason=extra_info.decode(errors="replace")[:MAX_REASON_BYTES])
        return MesetaError(f"{self}: {status.reason}", remedy=status.remedy)

    def _diagnose_failure(self) -> None:
        """Find out why a call failed. Raises MesetaError if retries would fail, UnreachableError if nothing listens."""
        # gRPC does not report why a call failed.
        host, port = parse_address(self.url)
        try:
            first = self._probe_first_byte(host, port)
            if self._keys is None:
                raise MesetaError(
                    f"{self} accepts only clients with keys; name their folder with --keys DIR or "
                    "data.service.keys=DIR, "
                    f"and write its address as {ENCRYPTED_SCHEME}://"
                )
            if not first and not self._probe_first_byte(host, port):  # It may have been stopping at the first probe.
                raise MesetaError(unknown_client_message(str(self), self._keys))
        except ssl.SSLError as error:
            if self._keys is not None and not isinstance(error, ssl.SSLEOFError):
                raise MesetaError(handshake_error_message(error, str(self), host, self._keys)) from None
        except OSError as error:
            raise UnreachableError(f"{self} cannot be reached: {_describe_os_error(error)}") from None

    def _probe_first_byte(self, host: str, port: int) -> bytes:
        """Return the first byte that the server sends after a handshake, if any. Raises OSError."""
        # A gRPC server closes the connection of an unknown client without sending a byte.
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as plain,
            self._context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            return b"" if self._keys is None else encrypted.recv(1)


def strip_flight_details(error: Exception) -> str:
    """Return the message of an Arrow Flight error without the details that Arrow and gRPC append."""
    return (
        error_summary(error).partition(". Detail:")[0].partition(". gRPC client debug context")[0][:MAX_MESSAGE_CHARS]
    )


def _unverified_context() -> ssl.SSLContext:
    # The context only tests whether a server uses TLS.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _describe_os_error(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens on its port"
    if isinstance(error, socket.gaierror):
        return "its host has no address"
    if isinstance(error, TimeoutError):
        return "nothing answers there"
    return error.strerror or error_summary(error)
