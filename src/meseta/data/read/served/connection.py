"""A dispatcher or a reader as others reach it, and what is said where they do not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from meseta.data.read.served.credentials import TOKEN_HEADER, Credentials, NoTokenError
from meseta.data.read.served.keys import TlsKeys, handshake_error_message, unknown_client_message
from meseta.data.read.served.messages import MAX_REASON_BYTES, ErrorStatus
from meseta.errors import MesetaError, StorageError, error_summary
from meseta.machine.environment_variables import environ
from meseta.machine.remote import ENCRYPTED_SCHEME, check_reachable, parse_address

environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when it begins: it would tell every handshake that fails

PROBE_TIMEOUT_S = 2.0
"""How long it may take to find out why a call has failed."""
MAX_MESSAGE_CHARS = 300
"""Limit on the text of an Arrow Flight error, for the same reason as `MAX_REASON_BYTES`."""
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
]
"""After how long without a word a call asks whether the other side is there: servers of gRPC end the connections of
those who ask more often. What was sent and is not acknowledged within the second of them ends a connection, too, which
finds out who has gone without a word; and so often one that does not come about is tried again. What comes is taken in
pieces of a megabyte: a seventh of the calls of the system that gRPC makes by itself."""


class UnreachableError(MesetaError):
    """Nobody answers, or the answer broke off: to ask again may help."""


def to_flight_error(error: Exception) -> flight.FlightServerError:
    """What a server raises for `Connection.wrap_errors` to turn back: another reader may do better where this one could
    not reach somebody else, or its storage, but not where it has met bad data."""
    told = error if isinstance(error, MesetaError) else MesetaError(error_summary(error))
    is_of_this_one = isinstance(error, UnreachableError | StorageError)
    status = b"" if is_of_this_one else ErrorStatus.of(told).to_bytes()
    return flight.FlightServerError(str(told)[:MAX_MESSAGE_CHARS], extra_info=status)


class Connection:
    """To one of them; it is made by the first call. Threads may share it."""

    def __init__(self, kind: str, url: str, credentials: Credentials) -> None:
        """`kind`: "dispatcher" or "reader". Raises MesetaError for what is no address, or does not go with the
        credentials: keys encrypt, and a token alone is shown to this machine only."""
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
        """Of a call that may take so long. Raises Unreachable if no token is stored yet, and MesetaError if it is in a
        file that others may read."""
        try:
            header = self._credentials.header_value()
        except NoTokenError as error:
            self._diagnose_failure()
            raise UnreachableError(f"{self} cannot be reached: {error}") from None
        return flight.FlightCallOptions(timeout=timeout_s, headers=[(TOKEN_HEADER.encode(), header.encode())])

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Turn what Arrow Flight raises into `UnreachableError`, or into the MesetaError that the other side has met,
        or that stands between both."""
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
        except (flight.FlightError, OSError, ValueError, RuntimeError) as error:  # Arrow maps codes of gRPC to these
            if isinstance(error, MesetaError):
                raise
            raise UnreachableError(f"{self} broke off: {strip_flight_details(error)}") from None

    def _told_by(self, extra_info: bytes) -> MesetaError:
        try:
            status = ErrorStatus.from_bytes(extra_info, str(self))
        except MesetaError:  # a sender of an older version: it is the text
            status = ErrorStatus(reason=extra_info.decode(errors="replace")[:MAX_REASON_BYTES])
        return MesetaError(f"{self}: {status.reason}", remedy=status.remedy)

    def _diagnose_failure(self) -> None:
        """See why a call has failed. Raises MesetaError where another one would fail as well, and Unreachable where
        nobody is there; gRPC tells both in one."""
        host, port = parse_address(self.url)
        try:
            first = self._probe_first_byte(host, port)
            if self._keys is None:
                raise MesetaError(
                    f"{self} answers those with keys alone; name their folder, by --keys DIR or data.service.keys=DIR, "
                    f"and write its address as {ENCRYPTED_SCHEME}://"
                )
            if not first and not self._probe_first_byte(host, port):  # it may have been ending when it was asked first
                raise MesetaError(unknown_client_message(str(self), self._keys))
        except ssl.SSLError as error:
            if self._keys is not None and not isinstance(error, ssl.SSLEOFError):
                raise MesetaError(handshake_error_message(error, str(self), host, self._keys)) from None
        except OSError as error:
            raise UnreachableError(f"{self} cannot be reached: {_describe_os_error(error)}") from None

    def _probe_first_byte(self, host: str, port: int) -> bytes:
        """Of what is said to who has shaken hands; none: a server of gRPC has closed without a word, as it does to
        clients that it does not know. Raises OSError."""
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as plain,
            self._context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            return b"" if self._keys is None else encrypted.recv(1)


def strip_flight_details(error: Exception) -> str:
    """What an error of Arrow Flight says, without what it adds."""
    return (
        error_summary(error).partition(". Detail:")[0].partition(". gRPC client debug context")[0][:MAX_MESSAGE_CHARS]
    )


def _unverified_context() -> ssl.SSLContext:
    """To find out whether somebody speaks TLS, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _describe_os_error(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, socket.gaierror):
        return "its host has no address"
    if isinstance(error, TimeoutError):
        return "nothing answers there"
    return error.strerror or error_summary(error)
