"""Files by name: on this machine, or by URL through fsspec (s3://, gs://, hdfs://, https://, memory://, ...)."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.errors import MesetaError, one_line

_EXTRAS = {"s3": "meseta[s3]", "s3a": "meseta[s3]", "gs": "meseta[gcs]", "gcs": "meseta[gcs]", "https": "fsspec[http]"}
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "modification_time", "ETag", "etag", "created")
"""What file systems call the time of the last change, or something else that changes with the content."""


def is_url(name: object) -> bool:
    """Whether fsspec reads it; anything else is a path on this machine."""
    return "://" in str(name)


@contextmanager
def remote_errors(what: str, url: str, verb: str) -> Iterator[None]:
    """Turn what file systems raise for the `url` of `what`, such as a source that cannot be `verb` "read", into one
    MesetaError that names it; each file system has exceptions of its own."""
    try:
        yield
    except MesetaError:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0].rpartition("::")[2]
        package = _EXTRAS.get(scheme, f"fsspec[{scheme}]")
        detail = " ".join(str(error).split())
        raise MesetaError(
            f"{what} {url!r}: {scheme}:// needs a package that is not installed ({detail}); pip install '{package}'"
        ) from None
    except Exception as error:
        raise MesetaError(
            f"{what} {url!r} cannot be {verb} ({one_line(error)}); check the URL, the network and the credentials"
        ) from None


@dataclass(frozen=True)
class Status:
    """What is known of a file before it is read."""

    size_bytes: int | None
    """None where its server does not tell."""
    changed: str
    """When it was written last, as its file system tells; may be empty."""
    is_folder: bool


def find(pattern: str) -> list[str]:
    """The file of this name, else those that match it as a pattern, in order of name; URLs for a URL.

    Raises MesetaError where its file system cannot be reached or is not installed.
    """
    if not is_url(pattern):
        # A name that exists is itself, even where it holds the signs of a pattern.
        return [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
    with remote_errors("source", pattern, "read"):
        system, path = _filesystem(pattern)
        if system.exists(path):
            return [pattern if "::" in pattern else system.unstrip_protocol(path)]
        return sorted(system.unstrip_protocol(found) for found in system.glob(path)) if glob.has_magic(path) else []


def status(name: str) -> Status:
    """Size and time of change. Raises OSError of a local file, MesetaError of a URL."""
    if not is_url(name):
        found = Path(name).stat()
        return Status(found.st_size, str(found.st_mtime_ns), Path(name).is_dir())
    with remote_errors("source", name, "read"):
        system, path = _filesystem(name)
        info = system.info(path)
    changed = next((str(info[key]) for key in _CHANGED if info.get(key)), "")
    return Status(info.get("size"), changed, info.get("type") == "directory")


def open_file(name: str) -> Any:
    """A file to read, in bytes and from any place of it.

    Raises OSError, or of a URL what its file system raises: see `remote_errors`.
    """
    if not is_url(name):
        return open(name, "rb")
    system, path = _filesystem(name)
    return system.open(path, "rb")


def refuse_url(what: str, path: Path) -> None:
    """Raises MesetaError where a URL was given for a folder that must be local; Path has made s3:/ of s3://."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise MesetaError(
            f"{what} must be a folder on this machine, got {str(path)!r}: sources may be URLs, datasets are written "
            "and read locally; choose a local folder, and copy it afterwards if need be"
        )


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, path
