"""TLS keys of dispatchers, readers and their clients, in a folder made by `meseta readers keys`.

    certificate.pem    certificate of dispatchers and readers, which clients verify; not secret
    key.pem            private key of this certificate, only on hosts of dispatchers and readers
    client.pem         certificate and private key of clients
    token              token that is sent with every call

Clients have certificate.pem, client.pem and token.
"""

from __future__ import annotations

import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meseta.data.service.credentials import Credentials, parse_token, read_secret
from meseta.errors import MesetaError, error_summary

CERTIFICATE_FILE, KEY_FILE, CLIENT_FILE, TOKEN_FILE = "certificate.pem", "key.pem", "client.pem", "token"
_SAME_FOLDER_REMEDY = "use the folder of keys with which it was started"
MAX_HANDSHAKE_ROUNDS = 8
"""Maximum number of message rounds of a TLS handshake."""


@dataclass(frozen=True)
class TlsKeys(Credentials):
    """Keys of a client. Secrets are not part of its text representation."""

    folder: Path
    certificate: bytes = field(repr=False)
    client: bytes = field(repr=False)
    token: bytes = field(repr=False)

    @staticmethod
    def load(folder: Path) -> TlsKeys:
        """Load a client's keys. Raises MesetaError if a file is missing or damaged, or if others may read a secret."""
        token = parse_token(
            read_key_file(folder / TOKEN_FILE, is_secret=True),
            f"keys: {str(folder / TOKEN_FILE)!r}",
            "copy it again, or make new keys with `meseta readers keys`",
        )
        keys = TlsKeys(
            folder, read_key_file(folder / CERTIFICATE_FILE), read_key_file(folder / CLIENT_FILE, is_secret=True), token
        )
        ends_s = ssl.cert_time_to_seconds(str(keys.client_context().get_ca_certs()[0]["notAfter"]))
        if ends_s < time.time():
            raise MesetaError(expired_certificate_message(f"keys: {str(folder / CERTIFICATE_FILE)!r}", ends_s))
        return keys

    def current_token(self) -> bytes:
        return self.token

    def rejection_message(self, who: str) -> str:
        return f"{who} expects another token than that in {str(self.folder / TOKEN_FILE)!r}; {_SAME_FOLDER_REMEDY}"

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context that verifies a server and identifies the client. Raises MesetaError if a file is
        damaged."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])  # Otherwise gRPC servers close the connection.
        _load_trusted_certificate(context, self.certificate, self.folder / CERTIFICATE_FILE)
        _load_own_certificate(context, self.folder / CLIENT_FILE, self.folder / CLIENT_FILE)
        return context

    def covered_hosts(self) -> str:
        covered: Any = self.client_context().get_ca_certs()[0].get("subjectAltName", ())
        return ", ".join(host for _, host in covered)


@dataclass(frozen=True)
class TlsServerKeys(TlsKeys):
    """Keys of a dispatcher or a reader."""

    key: bytes = field(repr=False)

    @staticmethod
    def load(folder: Path) -> TlsServerKeys:
        """Load a server's keys. Raises as `TlsKeys.load` does, and MesetaError if the private key does not match."""
        keys = TlsKeys.load(folder)
        key = read_key_file(folder / KEY_FILE, is_secret=True)
        return TlsServerKeys(folder, keys.certificate, keys.client, keys.token, key)

    def check_host(self, host: str) -> None:
        """Raise MesetaError unless clients of `host` and this server would accept each other (tested in memory)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_own_certificate(context, self.folder / CERTIFICATE_FILE, self.folder / KEY_FILE)
        _load_trusted_certificate(context, self.client, self.folder / CLIENT_FILE)
        context.verify_mode = ssl.CERT_REQUIRED
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = self.client_context().wrap_bio(to_client, to_server, server_hostname=host)
        answering = context.wrap_bio(to_server, to_client, server_side=True)
        try:
            for _ in range(MAX_HANDSHAKE_ROUNDS):
                for end in (asking, answering):
                    with suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as error:
            raise MesetaError(handshake_error_message(error, f"keys {str(self.folder)!r}", host, self)) from None


def handshake_error_message(error: ssl.SSLError, who: str, host: str, keys: TlsKeys) -> str:
    """Return the error message for a failed TLS handshake with `who`, which the client calls `host`."""
    code = getattr(error, "verify_code", None)
    if error.reason == "WRONG_VERSION_NUMBER":
        return f"{who} does not use encryption; start it with --keys, or remove the keys here"
    if code == 10:  # Numbers from OpenSSL's x509_vfy.h.
        return expired_certificate_message(who)
    if code in (62, 64):
        return (
            f"{who}: its certificate does not cover {host!r}, but {keys.covered_hosts()}; make new keys with "
            f"`meseta readers keys DIR --host {host}`, or use a name that it covers"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{who} has another certificate than {str(keys.folder / CERTIFICATE_FILE)!r}; {_SAME_FOLDER_REMEDY}"
    return f"{who} failed the TLS handshake ({error.reason or error_summary(error)}); {_SAME_FOLDER_REMEDY}"


def unknown_client_message(who: str, keys: TlsKeys) -> str:
    """Return the error message for a server that closed the connection after the handshake."""
    return f"{who} does not know the certificate of {str(keys.folder / CLIENT_FILE)!r}; {_SAME_FOLDER_REMEDY}"


def expired_certificate_message(who: str, ends_s: float | None = None) -> str:
    """Return the error message for an expired certificate."""
    when = "" if ends_s is None else time.strftime(" on %Y-%m-%d", time.gmtime(ends_s))
    return f"{who}: the certificate has expired{when}; make new keys with `meseta readers keys`, and restart with them"


def read_key_file(path: Path, *, is_secret: bool = False) -> bytes:
    """Read a file of keys. Raises MesetaError if it cannot be read, or if it is a secret that others may read."""
    remedy = "copy it from the folder that `meseta readers keys` has made"
    return read_secret(path, "keys", remedy, is_secret=is_secret)[0]


def _load_trusted_certificate(context: ssl.SSLContext, certificate: bytes, path: Path) -> None:
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise MesetaError(_damaged_message(path)) from None
    if not context.get_ca_certs():
        raise MesetaError(_damaged_message(path))


def _load_own_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password="")  # Otherwise OpenSSL asks for a password at the terminal.
    except (ssl.SSLError, ValueError) as error:
        is_mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        raise MesetaError(
            f"keys: {str(key)!r} is not the key of {str(certificate)!r}; use both from the same folder"
            if is_mismatch
            else _damaged_message(key)
        ) from None
    except OSError as error:
        raise MesetaError(f"keys: {str(key)!r} cannot be read ({error.strerror})") from None


def _damaged_message(path: Path) -> str:
    return f"keys: {str(path)!r} is damaged or not a key file; copy it again, or make new keys (`meseta readers keys`)"
