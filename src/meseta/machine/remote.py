"""Files by name: on this machine, or by URL through fsspec (s3://, gs://, hdfs://, https://, memory://, ...); and
addresses of dispatchers and readers."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Union

from meseta.errors import MesetaError, StorageError, error_summary, format_value
from meseta.machine.files import (
    MAX_DOCUMENT_BYTES,
    file_too_long_error,
    is_folder,
    path_exists,
    read_bounded,
    resolve_inside,
)
from meseta.machine.waits.activity import track_request

_PACKAGES = {
    "s3": "meseta[s3]",
    "s3a": "meseta[s3]",
    "gs": "meseta[gcs]",
    "gcs": "meseta[gcs]",
    "https": "fsspec[http]",
}
_CHANGE_STAMP_KEYS = (
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modification_time",
    "ETag",
    "etag",
    "created",
)
"""What file systems call the time of the last change, or something else that changes with the content."""

PLAIN_SCHEME, ENCRYPTED_SCHEME = "grpc", "grpc+tls"
"""Schemes of addresses without and with keys."""
HOST_LABEL_PATTERN = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
"""Pattern of one part of a host name."""
# Not urlsplit: it removes tabs and newlines, and keeps other control characters in the host.
_ADDRESS_PATTERN = re.compile(
    rf"(?:{PLAIN_SCHEME}|{re.escape(ENCRYPTED_SCHEME)})://"
    rf"(?P<host>{HOST_LABEL_PATTERN}(?:\.{HOST_LABEL_PATTERN})*|\[(?P<ipv6>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{{1,5}})"
)
_MAX_ADDRESS_LENGTH = 1024
_LOCALHOST = "localhost"


def is_url(name: object) -> bool:
    """Whether fsspec reads it; anything else is a path on this machine."""
    return "://" in str(name)


def validate_address(url: str) -> str:
    """Return an address such as grpc://127.0.0.1:7077, or grpc+tls://host7:7077 with keys, as it is.

    Raises MesetaError for anything else.
    """
    parse_address(url)
    return url


def parse_address(url: str) -> tuple[str, int]:
    """Host, without brackets, and port of an address. Raises MesetaError like `validate_address`."""
    match = _ADDRESS_PATTERN.fullmatch(url) if len(url) <= _MAX_ADDRESS_LENGTH else None
    if match is not None and 0 < int(match["port"]) < 1 << 16 and (not match["ipv6"] or _is_ip(match["ipv6"])):
        return match["ipv6"] or match["host"], int(match["port"])
    raise MesetaError(
        f"readers: an address is {PLAIN_SCHEME}://HOST:PORT, or {ENCRYPTED_SCHEME}://HOST:PORT, got {format_value(url)}"
    )


def check_encryption(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError unless an address is encrypted where there are keys, and only there."""
    if url.startswith(f"{ENCRYPTED_SCHEME}://") == has_keys:
        return
    if has_keys:
        way = (
            f"with keys an address is {ENCRYPTED_SCHEME}://HOST:PORT; start it with --keys, or leave the keys out here"
        )
    else:
        way = "it takes keys; name their folder, by --keys DIR or data.service.keys=DIR (`meseta readers keys`)"
    raise MesetaError(f"readers: {format_value(url)}: {way}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    return host == _LOCALHOST or (_is_ip(host) and ip_address(host).is_loopback)


def check_reachable(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError unless an address is valid, encrypted as it must be, and of this machine if there are no
    keys."""
    host, _ = parse_address(url)
    check_encryption(url, has_keys=has_keys)
    if not has_keys and not is_loopback(host):
        raise MesetaError(
            f"readers: {format_value(url)}: without keys an address is one of this machine, such as 127.0.0.1; make "
            f"keys with "
            "`meseta readers keys DIR`, and give --keys DIR, or data.service.keys=DIR"
        )


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


@contextmanager
def wrap_remote_errors(
    what: str, url: str, verb: str, *, passthrough: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn what file systems raise for the `url` of `what`, such as a source that cannot be `verb` "read", into one
    MesetaError that names it; each file system has exceptions of its own. Those of `passthrough` stay what they are."""
    try:
        yield
    except MesetaError:
        raise
    except passthrough:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0].rpartition("::")[2]
        package = _PACKAGES.get(scheme, f"fsspec[{scheme}]")
        detail = " ".join(str(error).split())
        raise MesetaError(
            f"{what} {url!r}: {scheme}:// needs a package that is not installed ({detail}); pip install '{package}'"
        ) from None
    except Exception as error:
        raise StorageError(
            f"{what} {url!r} cannot be {verb} ({error_summary(error)}); check the URL, the network and the credentials"
        ) from None


@dataclass(frozen=True)
class FileStatus:
    """What is known of a file before it is read."""

    size_bytes: int | None
    """None where its server does not tell."""
    change_stamp: str
    """When it was written last, as its file system tells; may be empty."""
    is_folder: bool


class MatchedFile(NamedTuple):
    """A file that a name or a pattern means."""

    name: str
    relative_path: str
    """Its path below the folder that was named, or that the pattern names before its first wildcard; empty if the file
    was named itself."""


def find_files(pattern: str) -> list[MatchedFile]:
    """Return the file of this name or all files in the folder of this name, else those that match it as a pattern, in
    order of path; URLs for a URL.

    Below folders, names that begin with _ or . are skipped, as by Hive and Spark.
    Raises MesetaError if its file system cannot be reached or is not installed, OSError for an unreadable local folder.
    """
    if is_url(pattern):
        with wrap_remote_errors("source", pattern, "read"):
            return sorted({*_find_remote(pattern)})
    # A name that exists is itself, even where it holds the signs of a pattern.
    if Path(pattern).exists():
        matches, start = [pattern], len(pattern)
    else:
        matches, start = glob.glob(pattern, recursive=True), len(_literal_prefix(pattern))
    found: set[MatchedFile] = set()
    for match in matches:
        paths: Iterable[str] = [match]
        if os.path.isdir(match):
            paths = _walk_files(match) if match == pattern or not _is_hidden(match) else ()
        found.update(MatchedFile(path, path[start:].strip("/")) for path in paths)
    return sorted(found)


def _find_remote(url: str) -> Iterator[MatchedFile]:
    system, path = _filesystem(url)
    if "::" in url and system.exists(path):
        yield MatchedFile(url, "")
        return
    if system.exists(path):
        start, entries = path, {path: system.info(path)}
    else:
        start = _literal_prefix(path)
        entries = system.glob(path, detail=True) if glob.has_magic(path) else {}
    for match, info in entries.items():
        paths = [match]
        if info.get("type") == "directory":
            paths = list(_find_files(system, match)) if match == path or not _is_hidden(match) else []
        for name in paths:
            below = name.strip("/")[len(match.strip("/")) + 1 :]
            if not any(map(_is_hidden, below.split("/"))):
                yield MatchedFile(system.unstrip_protocol(name), name.strip("/")[len(start.strip("/")) :].strip("/"))


def _literal_prefix(pattern: str) -> str:
    """The folders of a pattern before its first wildcard."""
    parts = pattern.split("/")
    return "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), parts))


def _is_hidden(path: str) -> bool:
    return _base_name(path).startswith(("_", "."))


def _walk_files(folder: str) -> Iterator[str]:
    """Files in a folder and in those below it, each folder once. Links to folders elsewhere are followed."""

    def fail(error: OSError) -> None:
        raise error

    def is_read_elsewhere(path: str) -> bool:
        return os.path.islink(path) and f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/")

    seen = set()
    for path, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        stat = os.stat(path)
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        chosen = [name for name in sorted(folders) if not _is_hidden(name)]
        folders[:] = [name for name in chosen if not is_read_elsewhere(os.path.join(path, name))]
        yield from (os.path.join(path, name) for name in names if not _is_hidden(name))


def file_status(name: str) -> FileStatus:
    """Size and time of change. Raises OSError of a local file, MesetaError of a URL."""
    if not is_url(name):
        found = Path(name).stat()
        return FileStatus(found.st_size, str(found.st_mtime_ns), Path(name).is_dir())
    with wrap_remote_errors("source", name, "read"):
        system, path = _filesystem(name)
        info = system.info(path)
    changed = next((str(info[key]) for key in _CHANGE_STAMP_KEYS if info.get(key)), "")
    return FileStatus(info.get("size"), changed, info.get("type") == "directory")


def open_file(name: str) -> Any:
    """A file to read, in bytes and from any place of it.

    Raises OSError, or of a URL what its file system raises: see `wrap_remote_errors`.
    """
    if not is_url(name):
        return open(name, "rb")
    system, path = _filesystem(name)
    return system.open(path, "rb")


def check_not_url(what: str, path: Path) -> None:
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


Location = Union["Path", "RemotePath"]
"""A folder or file of this machine, or at a URL."""
UPLOAD_PART_BYTES = 8 << 20
"""Of a larger file, uploaded at a time, several at once; object stores take no smaller ones than 5 MiB."""
RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Between attempts, beside those that a file system makes by itself."""
_PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
)
"""What comes again however often a request is sent; so do errors of arguments and values."""
_PERMANENT_ERRNOS = (errno.EINVAL, errno.ENOSYS, errno.EPERM)


def to_location(name: Path | RemotePath | str) -> Location:
    """A path of this machine, which file:// names too, or at another URL."""
    if isinstance(name, Path | RemotePath):
        return name
    if re.match(r"(file|local)://", name):
        return Path(name.partition("://")[2])
    return RemotePath(name.rstrip("/")) if is_url(name) else Path(name)


def read_inner_file(root: Location, inner: str) -> bytes:
    """A file in a folder, whole. Raises OSError, as where a link leads out of the folder, and for one that has more
    than MAX_DOCUMENT_BYTES; MesetaError where a URL is out of reach."""
    if isinstance(root, Path):
        return read_bounded(resolve_inside(root, inner))
    content = (root / inner).read(0, MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise file_too_long_error(str(root / inner), MAX_DOCUMENT_BYTES)
    return content


def location_exists(place: Location) -> bool:
    """Whether a file or folder is there. Raises OSError or StorageError if that cannot be told."""
    return path_exists(place) if isinstance(place, Path) else place.exists()


def location_is_folder(place: Location) -> bool:
    """Whether a folder is there. Raises OSError or StorageError if that cannot be told."""
    return is_folder(place) if isinstance(place, Path) else place.is_dir()


def modification_time_s(file: Location) -> float:
    """When a file was written, in seconds of the Unix clock; 0 where its store does not tell. Raises OSError."""
    if isinstance(file, Path):
        return file.stat().st_mtime
    info = file.info()
    stamp: Any = next((info[key] for key in _CHANGE_STAMP_KEYS if info.get(key)), 0.0)
    with suppress(ValueError, TypeError):
        if isinstance(stamp, str):
            stamp = datetime.fromisoformat(stamp)
        return float(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
    return 0.0


@dataclass(frozen=True, order=True)
class RemotePath:
    """A folder or file at a URL of fsspec, named as a Path names one of this machine.

    Stores of objects have no folders: one is there while a file below it is. Every request is sent again, a few times,
    where the network or the store fails; then MesetaError is raised, which names the URL. FileNotFoundError and
    FileExistsError are raised as they come.
    """

    url: str
    """Without a slash at its end."""

    def __truediv__(self, inner: str) -> RemotePath:
        at = self
        while inner.startswith("../"):
            at, inner = at.parent, inner[len("../") :]
        return RemotePath(f"{at.url}/{inner}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        return RemotePath(self.url.rpartition("/")[0])

    def check_installed(self) -> None:
        """Raise MesetaError, naming the package, where the file system of such URLs is not installed."""
        _checked_filesystem(self.url)

    def exists(self) -> bool:
        """Whether a file or folder is there."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether it is a folder, with something in it."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        """What the store calls it, `None` if nothing is there. `exists` and `isdir` of many file systems take any error
        for an absence."""
        with suppress(FileNotFoundError):
            return str(self.info().get("type", "file"))
        return None

    def num_bytes(self) -> int:
        """Of a file. Raises FileNotFoundError, IsADirectoryError."""
        info = self.info()
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.url)
        return int(info["size"])

    def entries(self) -> dict[str, bool]:
        """Whether each entry of this folder is a folder itself, by name; empty if this folder is missing."""
        with suppress(FileNotFoundError):
            listed = self._request("read", lambda system, path: system.ls(path, detail=True))
            return {_base_name(entry["name"]): entry.get("type") == "directory" for entry in listed}
        return {}

    def folders(self) -> list[str]:
        """Names of the folders in this one; none where it is not there."""
        return sorted(name for name, is_folder in self.entries().items() if is_folder)

    def files(self) -> dict[str, int]:
        """Bytes of every file below this folder, by its path from here; none where it is not there."""
        return {name: size for name, (size, _) in self.files_with_stamps().items()}

    def files_with_stamps(self) -> dict[str, tuple[int, str]]:
        """Return (bytes, stamp) of every file below this folder, by path from here.

        A file whose stamp is unchanged has not been written since. A store that reports neither a time nor an ETag
        gives empty stamps.
        """
        with suppress(FileNotFoundError):
            found: dict[str, Any] = self._request("read", _find_files)
            start = len(_checked_filesystem(self.url)[1].strip("/")) + 1
            return {
                name.strip("/")[start:]: (int(info.get("size") or 0), _change_stamp(info))
                for name, info in found.items()
            }
        return {}

    def read(self, start: int, end: int) -> bytes:
        """Bytes start..end-1 of a file, fewer where it ends before. Raises FileNotFoundError."""
        return bytes(self._request("read", lambda system, path: system.cat_file(path, start=start, end=end)))

    def create(self, content: bytes | memoryview) -> None:
        """Make a file, in parts where it is large, unless one is there: that raises FileExistsError, but for one of
        this very content, which may be what an attempt has made whose answer was lost."""
        whole = bytes(content)

        def put(system: Any, path: str) -> None:
            parts = {"chunksize": UPLOAD_PART_BYTES} if system.async_impl else {}
            system.pipe_file(path, whole, mode="create", **parts)

        gone = None
        for _ in range(2):
            try:
                self._request("written", put)
                return
            except FileExistsError:
                if not self._has_content(whole):
                    raise
                return
            except FileNotFoundError as error:  # the upload has ended before: it was made whole, or given up
                if self._has_content(whole):
                    return
                gone = error
        with wrap_remote_errors("checkpoint", self.url, "written"):
            assert gone is not None
            raise gone

    def _has_content(self, content: bytes) -> bool:
        """Whether a file is there, and what is in it."""
        with suppress(FileNotFoundError):
            return self.num_bytes() == len(content) and self.read(0, len(content)) == content
        return False

    def delete(self, *, recursive: bool = False) -> None:
        """A file, or with `recursive` a folder and all in it; nothing where it is not there."""
        with suppress(FileNotFoundError):
            if recursive:
                self._request("written", lambda system, path: system.rm(path, recursive=True))
            else:
                self._request("written", lambda system, path: system.rm_file(path))

    def abort_uploads(self) -> None:
        """Give up all uploads of files below this folder that nobody has finished; the parts of one take up room, and
        stay for ever, where a store of S3's kind is not told to remove them."""
        system, path = _checked_filesystem(self.url)
        if not hasattr(system, "call_s3"):
            return
        bucket, _, prefix = path.strip("/").partition("/")
        page = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        while True:
            with suppress(FileNotFoundError):  # a bucket that is not there is told when a file is written
                listed = self._call_s3("list_multipart_uploads", page)
                for upload in listed.get("Uploads", ()):
                    with suppress(FileNotFoundError):
                        key = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._call_s3("abort_multipart_upload", key)
                if listed.get("IsTruncated"):
                    page |= {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}
                    continue
            return

    def _call_s3(self, name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
        return dict(self._request("written", lambda system, path: system.call_s3(name, **arguments)))

    def info(self) -> dict[str, Any]:
        """What the store tells of a file; each has names of its own. Raises FileNotFoundError."""
        return dict(self._request("read", lambda system, path: system.info(path)))

    def _request(self, verb: str, send: Callable[[Any, str], Any]) -> Any:
        """What `send` returns of the file system and the path in it; tried again where that may help."""
        with wrap_remote_errors(
            "checkpoint", self.url, verb, passthrough=(FileNotFoundError, FileExistsError, IsADirectoryError)
        ):
            system, path = _checked_filesystem(self.url)
            for wait_s in (*RETRY_DELAYS_S, None):
                system.invalidate_cache()  # others write there too
                try:
                    with track_request(self.url, "read" if verb == "read" else "write", _transfer_thread(system)):
                        return send(system, path)
                except Exception as error:
                    if _is_exists_error(error):
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url) from None
                    if isinstance(error, FileNotFoundError):
                        raise FileNotFoundError(errno.ENOENT, error_summary(error), self.url) from None
                    if wait_s is None or _is_permanent(error):
                        raise
                time.sleep(wait_s)
        raise AssertionError


def _checked_filesystem(url: str) -> tuple[Any, str]:
    with wrap_remote_errors("checkpoint", url, "used"):
        return _filesystem(url)


def _find_files(system: Any, path: str) -> dict[str, Any]:
    """Return what `info` says of each file below a folder, by its whole path.

    Stores of objects list all of them in one request. The `find` that other file systems inherit leaves out folders
    that it cannot list.
    """
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind = type(system)
    lists_all = getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
    if lists_all or kind.find is not AbstractFileSystem.find:
        return dict(system.find(path, detail=True))
    found: dict[str, Any] = {}
    for entry in system.ls(path, detail=True):
        name = entry["name"]
        if entry.get("type") != "directory":
            found[name] = entry
        elif name.strip("/") != path.strip("/"):
            with suppress(FileNotFoundError):  # deleted since it was listed
                found |= _find_files(system, name)
    return found


def _transfer_thread(system: Any) -> int | None:
    """Native id of the thread that transfers the bytes of requests; None: the one that calls."""
    from fsspec import asyn

    thread = asyn.iothread[0] if system.async_impl else None
    return None if thread is None else thread.native_id


def _change_stamp(info: Mapping[str, Any]) -> str:
    return " ".join(str(info[key]) for key in _CHANGE_STAMP_KEYS if info.get(key))


def _base_name(name: object) -> str:
    return str(name).rstrip("/").rpartition("/")[2]


def _is_permanent(error: Exception) -> bool:
    """Whether the same request would meet the same error again."""
    if isinstance(error, OSError):
        return isinstance(error, _PERMANENT_ERRORS) or error.errno in _PERMANENT_ERRNOS
    return isinstance(error, ImportError | ValueError | TypeError | KeyError | NotImplementedError | AttributeError)


def _is_exists_error(error: Exception) -> bool:
    """Whether a store refused to create a file since there is one: some say so by the number of HTTP alone."""
    response = getattr(error.__cause__, "response", None)
    if isinstance(error, FileExistsError) or not isinstance(response, dict):
        return isinstance(error, FileExistsError)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412
