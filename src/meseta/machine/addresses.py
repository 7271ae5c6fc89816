"""Addresses of dispatchers and readers."""

from __future__ import annotations

import re
from ipaddress import ip_address

from meseta.errors import MesetaError, shown

PLAIN, ENCRYPTED = "grpc", "grpc+tls"
"""Schemes of addresses without and with keys."""
HOST_LABEL = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
"""Pattern of one part of a host name."""
# Not urlsplit: it removes tabs and newlines, and keeps other control characters in the host.
_ADDRESS = re.compile(
    rf"(?:{PLAIN}|{re.escape(ENCRYPTED)})://"
    rf"(?P<host>{HOST_LABEL}(?:\.{HOST_LABEL})*|\[(?P<ipv6>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{{1,5}})"
)
_MAX_LENGTH = 1024
_LOCAL_NAME = "localhost"


def checked_url(url: str) -> str:
    """Return an address such as grpc://127.0.0.1:7077, or grpc+tls://host7:7077 with keys, as it is.

    Raises MesetaError for anything else.
    """
    host_and_port(url)
    return url


def host_and_port(url: str) -> tuple[str, int]:
    """Host, without brackets, and port of an address. Raises MesetaError like `checked_url`."""
    match = _ADDRESS.fullmatch(url) if len(url) <= _MAX_LENGTH else None
    if match is not None and 0 < int(match["port"]) < 1 << 16 and (not match["ipv6"] or _is_ip(match["ipv6"])):
        return match["ipv6"] or match["host"], int(match["port"])
    raise MesetaError(f"readers: an address is {PLAIN}://HOST:PORT, or {ENCRYPTED}://HOST:PORT, got {shown(url)}")


def check_encryption(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError unless an address is encrypted where there are keys, and only there."""
    if url.startswith(f"{ENCRYPTED}://") == has_keys:
        return
    if has_keys:
        way = f"with keys an address is {ENCRYPTED}://HOST:PORT; start it with --keys, or leave the keys out here"
    else:
        way = "it takes keys; name their folder, by --keys DIR or data.service.keys=DIR (`meseta readers keys`)"
    raise MesetaError(f"readers: {shown(url)}: {way}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    return host == _LOCAL_NAME or (_is_ip(host) and ip_address(host).is_loopback)


def check_reachable(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError unless an address is valid, encrypted as it must be, and of this machine if there are no
    keys."""
    host, _ = host_and_port(url)
    check_encryption(url, has_keys=has_keys)
    if not has_keys and not is_loopback(host):
        raise MesetaError(
            f"readers: {shown(url)}: without keys an address is one of this machine, such as 127.0.0.1; make keys with "
            "`meseta readers keys DIR`, and give --keys DIR, or data.service.keys=DIR"
        )


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
