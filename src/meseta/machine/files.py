"""Files that commands and objects write: whole, or not at all; and files of strangers: regular, inside, bounded."""

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

MAX_DOCUMENT_BYTES = 32 << 20
"""The longest document that is read: the manifest of a model of several terabytes, or of 10,000 tables."""
MAX_DOCUMENT_VALUES = 1_000_000
"""The most values in it, by its commas and opening brackets: each takes memory many times its text."""
MAX_DOCUMENT_DEPTH = 64
"""How deeply a document may be nested."""
MAX_STRING_LENGTH = 1 << 20
"""The longest string in it: names, digests and states of generators are far shorter."""
MAX_NUMBER_LENGTH = 250
"""The longest number in a text, in characters: each one, hexadecimal ones too, can become a float64."""
MAX_INTEGER_BITS = 1000
"""The longest whole number in a JSON text, for the same reason."""
DEVICE_BLOCK_SIZES = (512, 1024, 2048, 4096)
"""Of devices, in bytes."""
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4096
_MAX_STEM_BYTES = 150
"""The longest name that `to_file_name` gives: room for a prefix and a suffix, also where file systems encrypt names."""
_SPECIAL_FILE_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnsafeFileError(OSError):
    """The error of a file that must not be read: it is not regular, a link leads out of its folder, or it is too
    long."""


def is_read_failure(error: OSError) -> bool:
    """Whether a read failed without saying anything about what is stored: the disk, the network, a limit of the process
    or a permission is at fault, and the same read may succeed later. False for a file that is missing or refused."""
    absent = (UnsafeFileError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return not isinstance(error, absent) and error.errno != errno.ELOOP


def stat_if_exists(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    """Return the status of what is at a path, `None` if nothing is there.

    Raises OSError if the system cannot tell. `os.path.exists` and its relatives then answer that nothing is there, and
    so do those of Path, depending on the error and the version of Python.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError as error:
        if is_read_failure(error):
            raise
        return None


def path_exists(path: str | Path) -> bool:
    """Whether a path leads to anything. Raises OSError if the system cannot tell."""
    return stat_if_exists(path) is not None


def is_folder(path: str | Path) -> bool:
    """Whether a path leads to a folder. Raises OSError if the system cannot tell."""
    status = stat_if_exists(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | Path) -> bool:
    """Whether a path is a symbolic link. Raises OSError if the system cannot tell."""
    status = stat_if_exists(path, follow=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, none if there is no such folder. Raises OSError if the system cannot tell."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if is_read_failure(error):
            raise
        return []


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all that is below a folder and is no folder itself; links are not followed. Raises OSError if some of it
    cannot be listed, which `Path.rglob` and `os.walk` leave out."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from walk_files(folder / entry.name)
            else:
                yield folder / entry.name


def open_regular(path: str | Path, flags: int = 0) -> int:
    """A descriptor to read a regular file by. Raises OSError, and has not opened it, for a FIFO, whose opening waits
    for a writer, a device, a socket and a folder."""
    _check_regular(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        _check_regular(path, os.fstat(descriptor))  # what has taken its place meanwhile, and was not waited for
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str | Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _SPECIAL_FILE_KINDS if is_kind(status.st_mode)), "something else")
        raise UnsafeFileError(errno.EINVAL, f"it is {kind}, no regular file", str(path))


def read_bounded(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """A regular file, whole. Raises OSError as `open_regular` does, and for one of more than `max_bytes`."""
    with open(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise file_too_long_error(str(path), max_bytes)
    return content


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a regular file, `None` if there is none that may be read. Raises StorageError if reading
    failed: what depends on the content must then not go on as if there were none."""
    try:
        return read_bounded(path)
    except OSError as error:
        if is_read_failure(error):
            raise StorageError(f"{str(path)!r} cannot be read ({error.strerror or error}); try again later") from None
        return None


def file_too_long_error(path: str, most_bytes: int) -> OSError:
    """The error of a file that goes on after the most that is read of it."""
    return UnsafeFileError(errno.EFBIG, f"it has more than {most_bytes:,} bytes, the most that is read", path)


def resolve_inside(root: str | Path, inner: str) -> Path:
    """`root/inner`: a regular file in the folder, to which no link leads on a way outside. Raises OSError."""
    path, base = Path(root, inner), os.path.realpath(root, strict=True)
    real = os.path.realpath(path, strict=True)
    if os.path.commonpath([real, base]) != base:
        raise UnsafeFileError(errno.EPERM, f"a link leads out of {str(root)!r}", str(path))
    _check_regular(path, os.stat(real))
    return path


def invalid_relative_path_reason(path: str) -> str | None:
    """Why a text is no name of a file inside a folder, the only one of this file; None where it is one.

    Parts are separated by '/', and none is empty, '.', '..', ends in a dot or a space, or has a backslash, a colon or a
    control character.
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
    """Whether it has characters that act on a terminal or on lines of text, or halves of surrogate pairs."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)


def escape(text: str) -> str:
    """A text in one line: the characters of `has_control_characters` as Python writes them, such as \\n."""
    if not has_control_characters(text):
        return text
    return "".join(c.encode("unicode_escape").decode() if has_control_characters(c) else c for c in text)


def to_file_name(name: str) -> str:
    """The name of a table or feature as one safe part of a path: 'a/b' gives 'a%2Fb'; a long one ends in a digest."""
    quoted = quote(name, safe="")
    if quoted.endswith("."):
        quoted = f"{quoted[:-1]}%2E"
    if len(quoted) <= _MAX_STEM_BYTES:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{quoted[: _MAX_STEM_BYTES - len(digest) - 1]}-{digest}"


def legacy_file_name(name: str) -> str:
    """What `to_file_name` gave before names could be longer than those of files."""
    quoted = quote(name, safe="")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")


def first_name_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that some file system takes for one: equal, or but for case and Unicode's spellings."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def count_json_values(content: bytes) -> int:
    """The values in a JSON text, by its commas and opening brackets."""
    return sum(map(content.count, (b",", b"[", b"{")))


def parse_json(content: bytes, *, finite: bool = True, max_values: int = MAX_DOCUMENT_VALUES) -> Any:
    """The plain data in a JSON text. Raises ValueError where it is none, gives a key twice, has a number that is not
    finite (with `finite`), half a surrogate pair, more than `max_values` values, a string over MAX_STRING_LENGTH, a
    whole number over MAX_INTEGER_BITS or a depth over MAX_DOCUMENT_DEPTH."""
    if count_json_values(content) > max_values:
        raise ValueError(f"it has more than {max_values:,} values")
    if len(content) > MAX_DOCUMENT_BYTES // 8 and not content.isascii():  # whose characters may take four bytes each
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
                    value.encode()
            elif finite and isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is no number")
            elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"it has a whole number of more than {MAX_INTEGER_BITS:,} bits")
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for c in containers for inner in ((*c, *c.values()) if isinstance(c, dict) else c)]
        depth += 1
    return document


def check_json_limits(content: bytes) -> None:
    """Raise ValueError if a JSON text that is about to be written exceeds what is read of a document."""
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_DOCUMENT_BYTES:,} are read")
    parse_json(content)


def to_json_types(value: Any, *, finite: bool = False) -> Any:
    """The value as JSON gives it back: tuples as lists, keys as text, and what JSON has no form for as its text. Raises
    ValueError, with `finite`, for a number that is not."""
    return json.loads(json.dumps(value, default=str, allow_nan=not finite))


def format_json(document: Any, *, levels: int = 2) -> str:
    """JSON for programs and people: a line for each entry of the outermost `levels` levels, and deeper ones in the line
    of theirs. The standard library indents all levels or none, and all by code that is not compiled."""
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
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def anonymous_file(name: str) -> IO[bytes]:
    """A scratch file that lies in no folder: in memory where the system has that, since /tmp may be full. `name` is for
    those who list a process's open files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()


def open_tmpfile(folder: Path) -> int:
    """An open file, to be read, written at its end and mapped, that `link_tmpfile` may put below `folder`, which need
    not be there yet: it lies in its file system, without a name, and goes with its last user. Where the system has none
    of this kind, one that gets no name. It is inherited by programs that a process becomes."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_APPEND if hasattr(os, "O_TMPFILE") else 0
    place = next((above for above in (folder, *folder.resolve().parents) if above.is_dir()), folder)
    with suppress(OSError):
        if flags:
            return os.open(place, flags, 0o666)
    with anonymous_file("meseta-unnamed") as file:
        return os.dup(file.fileno())


def link_tmpfile(descriptor: int, path: Path) -> bool:
    """Let an `open_tmpfile` be found under a path, whose former file goes; whether the system can."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
            return True
        path.unlink(missing_ok=True)
        # A folder to begin at makes Python follow the link, as the kernel asks for here; the source is absolute.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=folder, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def is_disk_full(error: OSError) -> bool:
    """Whether the system had no room for a write: on the disk, in the user's share of it, or in one file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def move(source: str | Path, place: str | Path) -> None:
    """Rename, so that a reader finds what was there before or what comes, and nothing between. Raises OSError."""
    os.replace(source, place)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; raises OSError, as where some file systems find out
    late that the disk is full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """`sync` every file under a folder, and the names in every folder of it."""
    for inner, _, names in walk_bottom_up(folder):
        for name in names:
            sync(inner / name)
        sync(inner)


def walk_bottom_up(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """`os.walk` from the innermost folders up. Raises OSError if one cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for inner, folders, names in os.walk(folder, topdown=False, onerror=fail):
        yield Path(inner), folders, names


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` by one rename at the end, when its files are on the disk.

    Nothing of it is left after an error. Raises MesetaError where the system refuses to write.
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
    """Raise MesetaError, before a long command begins, where `path` cannot become a file."""
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # such as a link to itself
        raise MesetaError(f"{str(path)!r} cannot be written: {error.strerror}; name another") from None
    if path.is_dir():
        raise MesetaError(f"{str(path)!r} is a folder; name a file")
    if path.exists() and not path.is_file():
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise MesetaError(f"{str(path)!r} cannot be written: its folder does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise MesetaError(f"{str(path)!r} cannot be written: its folder takes no new files; name another")


def append_atomic(file: IO[bytes], content: bytes) -> None:
    """Add to the end of an unbuffered file, or add nothing. Raises OSError where there is no room."""
    start, rest = file.tell(), memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def write_atomic(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8, so that a reader, an interruption or a full disk finds the old file or the new one.

    A link keeps its place, and the file that it names is replaced. What is no plain file, such as /dev/stdout, is
    written to as it stands. Characters that UTF-8 does not have become question marks. Raises MesetaError where the
    file cannot be written, and leaves the former one.
    """
    check_writable_path(path)
    place, content = Path(path).resolve(), text.encode("utf-8", errors="replace")
    # Runs delete what ends like this in their folder, should a kill leave it there.
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
            raise MesetaError(f"{str(path)!r} cannot be written: {reason}; choose another") from None
        raise


def direct_io_block_bytes(folder: Path) -> tuple[int, str | None]:
    """The least that can be read directly from a file in a folder, found by trying; and why nothing can, where nothing
    can. Raises OSError where the folder cannot be written."""
    if not hasattr(os, "O_DIRECT"):
        return DEVICE_BLOCK_SIZES[0], "this system has no direct transfers"
    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, DEVICE_BLOCK_SIZES[-1]) as memory:
        file.write(bytes(2 * DEVICE_BLOCK_SIZES[-1]))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return DEVICE_BLOCK_SIZES[0], f"its file system has no direct transfers: {error.strerror}"
        try:
            for block in DEVICE_BLOCK_SIZES:
                if _can_read_block(descriptor, memory, block):
                    return block, None
        finally:
            os.close(descriptor)
    return DEVICE_BLOCK_SIZES[0], f"its file system refuses direct reads of up to {DEVICE_BLOCK_SIZES[-1]:,} bytes"


def _can_read_block(descriptor: int, memory: mmap.mmap, block: int) -> bool:
    """Whether the second block can be read alone."""
    try:
        with memoryview(memory) as view, view[:block] as part:
            return os.preadv(descriptor, [part], block) == block
    except OSError:
        return False
