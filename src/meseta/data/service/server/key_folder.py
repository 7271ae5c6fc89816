"""Creation of key folders, which `meseta.data.service.keys` reads."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meseta.data.service.credentials import new_token, write_secret
from meseta.data.service.keys import CERTIFICATE_FILE, CLIENT_FILE, KEY_FILE, TOKEN_FILE, TlsServerKeys
from meseta.errors import format_value
from meseta.spec import MesetaError
from meseta.system.files import atomic_folder
from meseta.system.remote import HOST_LABEL_PATTERN

_KEY_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
HOST_PATTERN = re.compile(rf"{HOST_LABEL_PATTERN}(\.{HOST_LABEL_PATTERN})*|\*(\.{HOST_LABEL_PATTERN}){{2,}}")
"""DNS name of a host. The first label may be `*` if at least two labels follow."""


def make_keys(folder: Path, hosts: Sequence[str], days: float) -> None:
    """Create a folder with certificates for dispatchers and readers on `hosts`, a client certificate and a token.

    `hosts` are names or addresses. Certificates are valid for `days`. Raises MesetaError if the folder exists, a host
    is invalid, or the folder cannot be written.
    """
    names = [_subject_name(host) for host in hosts]
    if folder.exists() or folder.is_symlink():
        raise MesetaError(f"keys: folder {str(folder)!r} already exists; choose another folder, or remove it")
    certificate, key = _make_certificate(ExtendedKeyUsageOID.SERVER_AUTH, days, names)
    client = b"".join(_make_certificate(ExtendedKeyUsageOID.CLIENT_AUTH, days))
    with atomic_folder(folder) as inside:
        write_secret(inside / CERTIFICATE_FILE, certificate, 0o644)
        write_secret(inside / KEY_FILE, key)
        write_secret(inside / CLIENT_FILE, client)
        write_secret(inside / TOKEN_FILE, new_token() + b"\n")
        TlsServerKeys.load(inside)  # Check the files before the folder gets its name.


def local_hosts() -> list[str]:
    """Return names and addresses by which this machine is reached."""
    return list(dict.fromkeys(["localhost", "127.0.0.1", socket.gethostname()]))


def _subject_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if len(host) > 253 or not HOST_PATTERN.fullmatch(host):
            raise MesetaError(f"keys: --host must be a host name or an IP address, got {format_value(host)}") from None
        return x509.DNSName(host)


def _make_certificate(
    usage: x509.ObjectIdentifier, days: float, hosts: Sequence[x509.GeneralName] = ()
) -> tuple[bytes, bytes]:
    """Return a self-signed certificate, which cannot sign others, and its private key, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"meseta readers {secrets.token_hex(8)}")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # Clocks of hosts differ.
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_KEY_USAGE, critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return (
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
