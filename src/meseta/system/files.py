"""Atomic writes, and checked reads of untrusted files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from meseta.errors import MesetaError, StorageError

# Enough for the manifest of a model of several terabytes, or of 10,000 tables.
MAX_DOCUMENT_BYTES = 32 << 20
"""Maximum size of a JSON or YAML document that is read."""
# A parsed value takes many times the memory of its text.
MAX_DOCUMENT_VALUES = 1_000_000
"""Maximum number of values in a document, counted by commas and opening brackets."""
MAX_DOCUMENT_DEPTH = 64
# Names, digests and states of random generators are far shorter.
MAX_STRING_LENGTH = 1 << 20
"""Maximum number of characters of a string in a document."""
# Each number within these two limits, also in hexadecimal, can be converted to float64.
MAX_NUMBER_LENGTH = 250
"""Maximum number of characters of a number in YAML."""
MAX_INTEGER_BITS = 1000
DEVICE_BLOCK_SIZES = (512, 1024, 2048, 4096)
"""Possible logical block sizes of disks, in bytes."""
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4096
# Leaves space for a prefix and a suffix, also on file systems that encrypt names.
_MAX_STEM_BYTES = 150
_SPECIAL_FILE_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnsafeFileError(OSError):
    """Refusal to read a file that is not regular, is too large, or is a link to another folder."""


def is_read_failure(error: OSError) -> bool:
    """Whether `error` says nothing about the stored data, so that the same read may succeed later.

    Such errors come from the disk, the network, a process limit or a permission. A missing or refused file is no read
    failure.
    """
    absent = (UnsafeFileError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return not isinstance(error, absent) and error.errno != errno.ELOOP


def stat_if_exists(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    """Return the status of a file or folder, or `None` if the path does not exist. Raises OSError if `stat` fails."""
    # os.path.exists returns False if stat fails. So does Path.exists, depending on the error and the Python version.
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError as error:
        if is_read_failure(error):
            raise
        return None


def path_exists(path: str | Path) -> bool:
    """Whether a path exists. Raises OSError if `stat` fails."""
    return stat_if_exists(path) is not None


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder or a link to one. Raises OSError if `stat` fails."""
    status = stat_if_exists(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | Path) -> bool:
    """Whether a path is a symbolic link. Raises OSError if `stat` fails."""
    status = stat_if_exists(path, follow=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, or an empty list if it does not exist. Raises OSError if reading fails."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if is_read_failure(error):
            raise
        return []


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder without following links. Raises OSError if a folder cannot be listed."""
    # Path.rglob and os.walk skip folders that they cannot list.
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from walk_files(folder / entry.name)
            else:
                yield folder / entry.name


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises OSError for a folder, FIFO, device or socket, without opening it.
    """
    _check_regular(path, os.stat(path))  # Opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        # Another process may have replaced the file after the first check. O_NONBLOCK keeps open from waiting.
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str | Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _SPECIAL_FILE_KINDS if is_kind(status.st_mode)), "something else")
        raise UnsafeFileError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_bounded(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a regular file. Raises OSError if it is not regular, or has more than `max_bytes` bytes."""
    with open(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise file_too_long_error(str(path), max_bytes)
    return content


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file, or `None` if it is missing or refused. Raises StorageError if reading fails."""
    # A caller must not treat a failed read as a missing file.
    try:
        return read_bounded(path)
    except OSError as error:
        if is_read_failure(error):
            raise StorageError(f"{str(path)!r} cannot be read ({error.strerror or error}); try again later") from None
        return None


def file_too_long_error(path: str, most_bytes: int) -> OSError:
    """Return the error for a file that exceeds the size limit."""
    return UnsafeFileError(errno.EFBIG, f"it has more than {most_bytes:,} bytes, the maximum that is read", path)


def resolve_inside(root: str | Path, inner: str) -> Path:
    """Return `root/inner`. Raises OSError if it is not a regular file, or resolves to a path outside `root`."""
    path, base = Path(root, inner), os.path.realpath(root, strict=True)
    real = os.path.realpath(path, strict=True)
    if os.path.commonpath([real, base]) != base:
        raise UnsafeFileError(errno.EPERM, f"a link leads out of {str(root)!r}", str(path))
    _check_regular(path, os.stat(real))
    return path


def invalid_relative_path_reason(path: str) -> str | None:
    """Return why `path` is not a canonical path relative to a folder, or `None` if it is.

    Parts are separated by '/'. A part must not be empty, '.' or '..', end in a dot or a space, or contain a backslash,
    a colon or a control character.
    """
    parts = path.split("/")
    if not path or path.startswith("/"):
        return "it is not relative"
    if ".." in parts:
        return "it leads outside"
    if any(part != part.rstrip(". ") or not part for part in parts):
        return "it has a part that is empty, or ends in a dot or a space"
    if any(character in "\\:" for character in path) or has_control_characters(path):
        return "it has a backslash, a colon or a control character"
    if len(path.encode()) > _MAX_PATH_BYTES or any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        return "it is too long"
    return None


def has_control_characters(text: str) -> bool:
    """Whether a text contains control characters, line separators or unpaired surrogates."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)


def escape(text: str) -> str:
    """Escape control characters of a text as in a Python string, so that it prints in one line."""
    if not has_control_characters(text):
        return text
    return "".join(c.encode("unicode_escape").decode() if has_control_characters(c) else c for c in text)


def to_file_name(name: str) -> str:
    """Convert the name of a table or feature to a file name, such as 'a%2Fb' for 'a/b'.

    Long names are truncated and end in a digest.
    """
    quoted = quote(name, safe="")
    if quoted.endswith("."):
        quoted = f"{quoted[:-1]}%2E"
    if len(quoted) <= _MAX_STEM_BYTES:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{quoted[: _MAX_STEM_BYTES - len(digest) - 1]}-{digest}"


def legacy_file_name(name: str) -> str:
    """Return the result of an earlier version of `to_file_name`, which did not truncate long names."""
    quoted = quote(name, safe="")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")


def first_name_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two names that are equal up to case and Unicode normalization, or `None`."""
    # Some file systems treat such names as the same file.
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def count_json_values(content: bytes) -> int:
    """Return an upper bound on the number of values in a JSON text, from its commas and opening brackets."""
    return sum(map(content.count, (b",", b"[", b"{")))


def parse_json(content: bytes, *, finite: bool = True, max_values: int = MAX_DOCUMENT_VALUES) -> Any:
    """Parse an untrusted JSON text in UTF-8. `finite` rejects inf and nan.

    Raises ValueError if the text is not JSON, has a duplicate key or an unpaired surrogate, or exceeds `max_values`,
    `MAX_STRING_LENGTH`, `MAX_INTEGER_BITS` or `MAX_DOCUMENT_DEPTH`.
    """
    if count_json_values(content) > max_values:
        raise ValueError(f"it has more than {max_values:,} values")
    # Python may store a text with a non-ASCII character in four bytes per character.
    if len(content) > MAX_DOCUMENT_BYTES // 8 and not content.isascii():
        raise ValueError(f"it has more than {MAX_DOCUMENT_BYTES // 8:,} bytes, and some characters that are not ASCII")
    try:
        document = json.loads(content.decode(), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [document], 0
    while level:
        if depth > MAX_DOCUMENT_DEPTH:
            raise ValueError("it is nested too deeply")
        for value in level:
            if isinstance(value, str):
                if len(value) > MAX_STRING_LENGTH:
                    raise ValueError(f"it has a string of more than {MAX_STRING_LENGTH:,} characters")
                if not value.isascii():
                    value.encode()  # Raises UnicodeEncodeError for an unpaired surrogate.
            elif finite and isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
            elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"it has an integer of more than {MAX_INTEGER_BITS:,} bits")
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for c in containers for inner in ((*c, *c.values()) if isinstance(c, dict) else c)]
        depth += 1
    return document


def check_json_limits(content: bytes) -> None:
    """Raise ValueError if a JSON text exceeds the limits of `parse_json`. Call it before writing the text."""
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_DOCUMENT_BYTES:,} are read")
    parse_json(content)


def to_json_types(value: Any, *, finite: bool = False) -> Any:
    """Return `value` after a round trip through JSON: tuples become lists, and keys and unknown types become strings.

    Raises ValueError for inf and nan if `finite` is set.
    """
    return json.loads(json.dumps(value, default=str, allow_nan=not finite))


def format_json(document: Any, *, levels: int = 2) -> str:
    """Format JSON with one line for each entry of the outermost `levels` levels. Deeper levels are not indented."""
    # json.dumps indents either all levels or none, and indents in Python code, not in C.
    return _format_levels(document, levels, "\n") + "\n"


def _format_levels(value: Any, levels: int, margin: str) -> str:
    is_dict = isinstance(value, dict)
    if not levels or not value or not (is_dict or isinstance(value, list | tuple)):
        return json.dumps(value)
    if is_dict and not all(isinstance(key, str) for key in value):
        return json.dumps(value)
    inner = f"{margin} "
    entries = [_format_levels(entry, levels - 1, inner) for entry in (value.values() if is_dict else value)]
    if is_dict:
        entries = [f"{json.dumps(key)}: {entry}" for key, entry in zip(value, entries, strict=True)]
    first, last = "{}" if is_dict else "[]"
    return f"{first}{inner}{f',{inner}'.join(entries)}{margin}{last}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"key {key!r} is given twice")
        document[key] = value
    return document


def anonymous_file(name: str) -> IO[bytes]:
    """Create a scratch file without a path, in memory if the system supports it.

    `name` is shown in listings of the process's open files.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")  # The disk of /tmp may be full.
    return tempfile.TemporaryFile()


def open_tmpfile(folder: Path) -> int:
    """Open an unnamed file for reading, appending and mapping, which `link_tmpfile` can link below `folder`.

    `folder` may be created later. The file is freed with its last descriptor, which programs started by exec inherit.
    On a system without O_TMPFILE, the file cannot be linked.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_APPEND if hasattr(os, "O_TMPFILE") else 0
    place = next((above for above in (folder, *folder.resolve().parents) if above.is_dir()), folder)
    with suppress(OSError):
        if flags:
            return os.open(place, flags, 0o666)
    with anonymous_file("meseta-unnamed") as file:
        return os.dup(file.fileno())


def link_tmpfile(descriptor: int, path: Path) -> bool:
    """Link a file of `open_tmpfile` to a path, and replace an existing file there. Returns whether it succeeded."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
            return True
        path.unlink(missing_ok=True)
        # The link of /proc must be followed, which Python does only if src_dir_fd is given. The source is absolute.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=folder, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because the disk is full, or a quota or the maximum file size is exceeded."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def move(source: str | Path, place: str | Path) -> None:
    """Atomically rename `source` to `place`, and replace a file there. Raises OSError."""
    os.replace(source, place)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk. Raises OSError if that fails."""
    # Some file systems report a full disk only here.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Sync all files and folders below `folder`, and then `folder`."""
    for inner, _, names in walk_bottom_up(folder):
        for name in names:
            sync(inner / name)
        sync(inner)


def walk_bottom_up(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder from the innermost folders up, as `os.walk`. Raises OSError if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for inner, folders, names in os.walk(folder, topdown=False, onerror=fail):
        yield Path(inner), folders, names


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder, and renames it to `out` once its files are on the disk.

    The temporary folder is removed after an error. Raises MesetaError if writing fails.
    """
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_all(temporary)
        move(temporary, out)
        sync(out.parent)
    except OSError as error:
        raise MesetaError(f"{str(out)!r} cannot be written: {error.strerror or error}; make room there") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_writable_path(path: str | Path) -> None:
    """Raise MesetaError if `path` cannot be written as a file. Call it before a long computation."""
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # For example a link to itself.
        raise MesetaError(f"{str(path)!r} cannot be written: {error.strerror}; choose another file") from None
    if path.is_dir():
        raise MesetaError(f"{str(path)!r} is a folder; name a file")
    if path.exists() and not path.is_file():  # For example /dev/stdout, which `write_atomic` writes directly.
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise MesetaError(f"{str(path)!r} cannot be written: its folder does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise MesetaError(f"{str(path)!r} cannot be written: its folder is read-only; choose another folder")


def append_atomic(file: IO[bytes], content: bytes) -> None:
    """Append `content` to an unbuffered file. If that fails, the file is truncated to its former size.

    Raises OSError, for example if the disk is full.
    """
    start, rest = file.tell(), memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def write_atomic(path: str | Path, text: str) -> None:
    """Atomically replace a file by `text` in UTF-8. Unpaired surrogates become question marks.

    If `path` is a link, its target is replaced. A special file such as /dev/stdout is written directly. Raises
    MesetaError if writing fails, and keeps the former file.
    """
    check_writable_path(path)
    place, content = Path(path).resolve(), text.encode("utf-8", errors="replace")
    # A run deletes files with this suffix from its folder, because a killed process leaves them behind.
    unfinished = place.with_name(f".meseta-{os.getpid()}.tmp")
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)
            return
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        move(unfinished, place)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise MesetaError(f"{str(path)!r} cannot be written: {reason}; choose another file") from None
        raise


def direct_io_block_bytes(folder: Path) -> tuple[int, str | None]:
    """Return (block size, reason) for direct I/O on files of a folder, determined with a test file.

    `reason` says why direct I/O is not available, or is `None` if it is. Raises OSError if the folder is not writable.
    """
    if not hasattr(os, "O_DIRECT"):
        return DEVICE_BLOCK_SIZES[0], "this system has no direct I/O"
    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, DEVICE_BLOCK_SIZES[-1]) as memory:
        file.write(bytes(2 * DEVICE_BLOCK_SIZES[-1]))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return DEVICE_BLOCK_SIZES[0], f"its file system has no direct I/O: {error.strerror}"
        try:
            for block in DEVICE_BLOCK_SIZES:
                if _can_read_block(descriptor, memory, block):
                    return block, None
        finally:
            os.close(descriptor)
    return DEVICE_BLOCK_SIZES[0], f"its file system refuses direct reads of up to {DEVICE_BLOCK_SIZES[-1]:,} bytes"


def _can_read_block(descriptor: int, memory: mmap.mmap, block: int) -> bool:
    # Read the second block, whose offset is aligned to `block` only.
    try:
        with memoryview(memory) as view, view[:block] as part:
            return os.preadv(descriptor, [part], block) == block
    except OSError:
        return False
