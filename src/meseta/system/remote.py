"""Local files, and files at URLs of fsspec (s3://, gs://, hdfs://, https://, memory://, ...).

The module also parses the addresses of dispatchers and readers.
"""

from __future__ import annotations

import errno
import glob
import io
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
from meseta.system.files import (
    MAX_DOCUMENT_BYTES,
    file_too_long_error,
    is_folder,
    path_exists,
    read_bounded,
    resolve_inside,
)
from meseta.system.waits import track_request

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
"""Keys under which file systems of fsspec report the modification time of a file, or its ETag."""

_READ_BUFFER_BYTES = 1 << 20

PLAIN_SCHEME, ENCRYPTED_SCHEME = "grpc", "grpc+tls"
"""Schemes of addresses without and with encryption."""
HOST_LABEL_PATTERN = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
"""Pattern of one part of a host name."""
# urlsplit would remove tabs and newlines, and accept other control characters in the host.
_ADDRESS_PATTERN = re.compile(
    rf"(?:{PLAIN_SCHEME}|{re.escape(ENCRYPTED_SCHEME)})://"
    rf"(?P<host>{HOST_LABEL_PATTERN}(?:\.{HOST_LABEL_PATTERN})*|\[(?P<ipv6>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{{1,5}})"
)
_MAX_ADDRESS_LENGTH = 1024
_LOCALHOST = "localhost"


def is_url(name: object) -> bool:
    """Whether `name` is a URL for fsspec. Any other name is a local path."""
    return "://" in str(name)


def validate_address(url: str) -> str:
    """Return `url` if it is a valid address, such as grpc://127.0.0.1:7077 or grpc+tls://host7:7077.

    Raises MesetaError otherwise.
    """
    parse_address(url)
    return url


def parse_address(url: str) -> tuple[str, int]:
    """Return (host without brackets, port) of an address. Raises MesetaError if it is invalid."""
    match = _ADDRESS_PATTERN.fullmatch(url) if len(url) <= _MAX_ADDRESS_LENGTH else None
    if match is not None and 0 < int(match["port"]) < 1 << 16 and (not match["ipv6"] or _is_ip(match["ipv6"])):
        return match["ipv6"] or match["host"], int(match["port"])
    raise MesetaError(
        f"readers: an address must be {PLAIN_SCHEME}://HOST:PORT, or {ENCRYPTED_SCHEME}://HOST:PORT, got "
        f"{format_value(url)}"
    )


def check_encryption(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError if an address is encrypted without keys, or unencrypted with keys."""
    if url.startswith(f"{ENCRYPTED_SCHEME}://") == has_keys:
        return
    if has_keys:
        way = (
            f"with keys an address must be {ENCRYPTED_SCHEME}://HOST:PORT; start the process at this address with "
            "--keys, or leave the keys out here"
        )
    else:
        way = (
            "an encrypted address needs keys; set their folder with --keys DIR or data.service.keys=DIR (`meseta "
            "readers keys` creates one)"
        )
    raise MesetaError(f"readers: {format_value(url)}: {way}")


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is loopback, which only this machine can reach."""
    return host == _LOCALHOST or (_is_ip(host) and ip_address(host).is_loopback)


def check_reachable(url: str, *, has_keys: bool) -> None:
    """Raise MesetaError if an address is invalid, or does not match `has_keys`.

    With keys the address must be encrypted. Without keys it must be unencrypted and on this machine.
    """
    host, _ = parse_address(url)
    check_encryption(url, has_keys=has_keys)
    if not has_keys and not is_loopback(host):
        raise MesetaError(
            f"readers: {format_value(url)}: without keys an address must be on this machine, such as 127.0.0.1; create "
            f"keys with "
            "`meseta readers keys DIR`, and set --keys DIR, or data.service.keys=DIR"
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
    """Context manager that converts errors of file systems to MesetaError, or StorageError if an access failed.

    The message names `what` (such as "source") and `url`, which "cannot be `verb`" (such as "read"). Exceptions in
    `passthrough` are not converted.
    """
    # Each file system of fsspec has its own exceptions.
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
    """Metadata of a file or folder."""

    size_bytes: int | None
    """Size in bytes. `None` if the server does not report it."""
    change_stamp: str
    """Modification time or ETag, as reported by the file system. Empty if it reports none."""
    is_folder: bool


class MatchedFile(NamedTuple):
    """File found by `find_files`."""

    name: str
    relative_path: str
    """Path below the searched folder, or below the folders of a pattern before its first wildcard. Empty if the search
    was for this file."""


def find_files(pattern: str) -> list[MatchedFile]:
    """Return the file with this name, all files below the folder with this name, or those that match the pattern.

    Files are sorted by name, and names are URLs if `pattern` is a URL. Below folders, names that start with _ or . are
    skipped. Raises MesetaError if the file system is unreachable or not installed, and OSError if a local folder is
    unreadable.
    """
    # Hive and Spark skip these names as well.
    if is_url(pattern):
        with wrap_remote_errors("source", pattern, "read"):
            return sorted({*_find_remote(pattern)})
    # An existing name is not a pattern, even if it contains wildcard characters.
    if Path(pattern).exists():
        matches, start = [pattern], len(pattern)
    else:
        matches, start = glob.glob(pattern, recursive=True), len(_literal_prefix(pattern))
    files: set[MatchedFile] = set()
    for match in matches:
        paths: Iterable[str] = [match]
        if os.path.isdir(match):
            paths = _walk_files(match) if match == pattern or not _is_hidden(match) else ()
        files.update(MatchedFile(path, path[start:].strip("/")) for path in paths)
    return sorted(files)


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
    parts = pattern.split("/")
    return "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), parts))


def _is_hidden(path: str) -> bool:
    return _base_name(path).startswith(("_", "."))


def _walk_files(folder: str) -> Iterator[str]:

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
    """Return the metadata of a file. Raises OSError for a local file, and MesetaError for a URL."""
    if not is_url(name):
        status = Path(name).stat()
        return FileStatus(status.st_size, str(status.st_mtime_ns), Path(name).is_dir())
    with wrap_remote_errors("source", name, "read"):
        system, path = _filesystem(name)
        info = system.info(path)
    changed = next((str(info[key]) for key in _CHANGE_STAMP_KEYS if info.get(key)), "")
    return FileStatus(info.get("size"), changed, info.get("type") == "directory")


def open_file(name: str) -> Any:
    """Open a seekable binary file for reading.

    Raises OSError for a local file. For a URL, wrap the call in `wrap_remote_errors`.
    """
    if not is_url(name):
        return open(name, "rb")
    from fsspec.spec import AbstractBufferedFile

    system, path = _filesystem(name)
    file = system.open(path, "rb")
    # `readline` of these files, such as those of s3://, takes no size.
    return io.BufferedReader(file, _READ_BUFFER_BYTES) if isinstance(file, AbstractBufferedFile) else file


def check_not_url(what: str, path: Path) -> None:
    """Raise MesetaError if `path` was created from a URL."""
    # Path has converted s3:// to s3:/.
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise MesetaError(
            f"{what} must be a folder on this machine, got {str(path)!r}: sources may be URLs, but datasets are "
            "written and read locally; choose a local folder, and copy it afterwards if necessary"
        )


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, path


Location = Union["Path", "RemotePath"]
"""Local or remote file or folder."""
# Object stores require at least 5 MiB.
UPLOAD_PART_BYTES = 8 << 20
"""Part size of multipart uploads. Several parts are uploaded in parallel."""
# Many file systems of fsspec retry as well.
RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Seconds before each retry of a failed request."""
_PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
)
_PERMANENT_ERRNOS = (errno.EINVAL, errno.ENOSYS, errno.EPERM)


def to_location(name: Path | RemotePath | str) -> Location:
    """Convert a name to a local path or a remote one. URLs with file:// become local paths."""
    if isinstance(name, Path | RemotePath):
        return name
    if re.match(r"(file|local)://", name):
        return Path(name.partition("://")[2])
    return RemotePath(name.rstrip("/")) if is_url(name) else Path(name)


def read_inner_file(root: Location, inner: str) -> bytes:
    """Read a file in a folder.

    Raises OSError if the file is missing or larger than `MAX_DOCUMENT_BYTES`, or if a link leads out of the folder.
    Raises MesetaError if a URL is unreachable.
    """
    if isinstance(root, Path):
        return read_bounded(resolve_inside(root, inner))
    content = (root / inner).read(0, MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise file_too_long_error(str(root / inner), MAX_DOCUMENT_BYTES)
    return content


def location_exists(place: Location) -> bool:
    """Whether a file or folder exists. Raises OSError or StorageError if that cannot be determined."""
    return path_exists(place) if isinstance(place, Path) else place.exists()


def location_is_folder(place: Location) -> bool:
    """Whether a folder exists. Raises OSError or StorageError if that cannot be determined."""
    return is_folder(place) if isinstance(place, Path) else place.is_dir()


def modification_time_s(file: Location) -> float:
    """Return the modification time of a file in Unix seconds, or 0 if its store does not report it. Raises OSError."""
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
    """File or folder at a URL of fsspec, with an interface like that of Path.

    In an object store, a folder exists as long as a file below it exists. Failed requests are retried as in
    `RETRY_DELAYS_S`, then MesetaError with the URL is raised. FileNotFoundError and FileExistsError are raised
    unchanged.
    """

    url: str
    """URL without a trailing slash."""

    def __truediv__(self, inner: str) -> RemotePath:
        at = self
        while inner.startswith("../"):
            at, inner = at.parent, inner[len("../") :]
        return RemotePath(f"{at.url}/{inner}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def check_installed(self) -> None:
        """Raise MesetaError with the package to install if the file system of this URL is not installed."""
        _checked_filesystem(self.url)

    def exists(self) -> bool:
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether this is a folder with at least one entry."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        # `exists` and `isdir` of many file systems return False after any error.
        with suppress(FileNotFoundError):
            return str(self.info().get("type", "file"))
        return None

    def num_bytes(self) -> int:
        """Return the size of a file. Raises FileNotFoundError or IsADirectoryError."""
        info = self.info()
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.url)
        return int(info["size"])

    def entries(self) -> dict[str, bool]:
        """Return the entries of this folder: name -> whether it is a folder. Empty if this folder does not exist."""
        with suppress(FileNotFoundError):
            listed = self._request("read", lambda system, path: system.ls(path, detail=True))
            return {_base_name(entry["name"]): entry.get("type") == "directory" for entry in listed}
        return {}

    def folders(self) -> list[str]:
        """Return the sorted names of subfolders. Empty if this folder does not exist."""
        return sorted(name for name, is_folder in self.entries().items() if is_folder)

    def files(self) -> dict[str, int]:
        """Return the sizes of all files below this folder by relative path. Empty if this folder does not exist."""
        return {name: size for name, (size, _) in self.files_with_stamps().items()}

    def files_with_stamps(self) -> dict[str, tuple[int, str]]:
        """Return (size in bytes, stamp) of all files below this folder by relative path.

        The stamp of a file changes whenever the file is written. It is empty if the store reports neither a time nor an
        ETag.
        """
        with suppress(FileNotFoundError):
            entries: dict[str, Any] = self._request("read", _find_files)
            start = len(_checked_filesystem(self.url)[1].strip("/")) + 1
            return {
                name.strip("/")[start:]: (int(info.get("size") or 0), _change_stamp(info))
                for name, info in entries.items()
            }
        return {}

    def read(self, start: int, end: int) -> bytes:
        """Return bytes start..end-1 of a file, or fewer if the file ends earlier. Raises FileNotFoundError."""
        return bytes(self._request("read", lambda system, path: system.cat_file(path, start=start, end=end)))

    def create(self, content: bytes | memoryview) -> None:
        """Create a file, with a multipart upload if it is large.

        Raises FileExistsError if a file with other content exists.
        """
        # A file with the same content may be the result of an attempt whose response was lost.
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
            except FileNotFoundError as error:  # The multipart upload no longer exists: it was completed or aborted.
                if self._has_content(whole):
                    return
                gone = error
        with wrap_remote_errors("checkpoint", self.url, "written"):
            assert gone is not None
            raise gone

    def _has_content(self, content: bytes) -> bool:
        with suppress(FileNotFoundError):
            return self.num_bytes() == len(content) and self.read(0, len(content)) == content
        return False

    def delete(self, *, recursive: bool = False) -> None:
        """Delete a file, or with `recursive` a folder and its contents. Does nothing if it does not exist."""
        with suppress(FileNotFoundError):
            if recursive:
                self._request("written", lambda system, path: system.rm(path, recursive=True))
            else:
                self._request("written", lambda system, path: system.rm_file(path))

    def abort_uploads(self) -> None:
        """Abort all unfinished multipart uploads below this folder. Does nothing unless the store is S3-compatible."""
        # The parts of an unfinished upload occupy storage until it is aborted.
        system, path = _checked_filesystem(self.url)
        if not hasattr(system, "call_s3"):
            return
        bucket, _, prefix = path.strip("/").partition("/")
        page = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        while True:
            with suppress(FileNotFoundError):  # Writing a file reports a missing bucket.
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
        """Return the metadata of a file, whose keys depend on the store. Raises FileNotFoundError."""
        return dict(self._request("read", lambda system, path: system.info(path)))

    def _request(self, verb: str, send: Callable[[Any, str], Any]) -> Any:
        with wrap_remote_errors(
            "checkpoint", self.url, verb, passthrough=(FileNotFoundError, FileExistsError, IsADirectoryError)
        ):
            system, path = _checked_filesystem(self.url)
            for wait_s in (*RETRY_DELAYS_S, None):
                system.invalidate_cache()  # Other processes may have changed the folder.
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
    # Object stores override `find` and list all files in one request. The inherited `find` of other file systems omits
    # folders that it cannot list, so list them one by one.
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind = type(system)
    lists_all = getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
    if lists_all or kind.find is not AbstractFileSystem.find:
        return dict(system.find(path, detail=True))
    files: dict[str, Any] = {}
    for entry in system.ls(path, detail=True):
        name = entry["name"]
        if entry.get("type") != "directory":
            files[name] = entry
        elif name.strip("/") != path.strip("/"):
            with suppress(FileNotFoundError):  # Deleted after it was listed.
                files |= _find_files(system, name)
    return files


def _transfer_thread(system: Any) -> int | None:
    """Return the native id of the thread that transfers the bytes of requests. `None` means the calling thread."""
    from fsspec import asyn

    thread = asyn.iothread[0] if system.async_impl else None
    return None if thread is None else thread.native_id


def _change_stamp(info: Mapping[str, Any]) -> str:
    return " ".join(str(info[key]) for key in _CHANGE_STAMP_KEYS if info.get(key))


def _base_name(name: object) -> str:
    return str(name).rstrip("/").rpartition("/")[2]


def _is_permanent(error: Exception) -> bool:
    if isinstance(error, OSError):
        return isinstance(error, _PERMANENT_ERRORS) or error.errno in _PERMANENT_ERRNOS
    return isinstance(error, ImportError | ValueError | TypeError | KeyError | NotImplementedError | AttributeError)


def _is_exists_error(error: Exception) -> bool:
    # Some file systems report this case only by the HTTP status 412 (precondition failed).
    response = getattr(error.__cause__, "response", None)
    if isinstance(error, FileExistsError) or not isinstance(response, dict):
        return isinstance(error, FileExistsError)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412
