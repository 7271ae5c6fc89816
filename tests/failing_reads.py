"""Reads that fail: every open, read, stat and listing below some folders, at the lowest layer that Python reaches, and
every question to a file system of fsspec.

Files that other libraries open by themselves are not seen; checkpoints have none.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

ERRORS = (errno.EIO, errno.EMFILE, errno.ESTALE)
PATH_READS = ("open", "stat", "lstat", "fstat", "readlink", "listdir", "scandir", "read", "pread", "preadv")
"""Functions of `os` whose first argument is a path or a descriptor."""


@dataclass(frozen=True)
class Read:
    """One question to a file system."""

    number: int
    """Position among the reads of a `failing_reads` block, from 0."""
    kind: str
    """Name of the function, for example 'stat'."""
    path: str


Choose = Callable[[Read], int | None]
"""The error number with which a read fails; `None` if it does not fail."""


class _Watch:
    def __init__(self, roots: tuple[str, ...], choose: Choose) -> None:
        self.reads: list[Read] = []
        self._roots, self._choose = roots, choose
        self._lock = threading.Lock()

    def covers(self, path: str) -> bool:
        return any(path == root or path.startswith(f"{root}/") for root in self._roots)

    def ask(self, kind: str, path: str | None) -> None:
        """Count a read, and raise OSError if it is to fail."""
        if path is None or not self.covers(path):
            return
        with self._lock:
            read = Read(len(self.reads), kind, path)
            self.reads.append(read)
            number = self._choose(read)
        if number is not None:
            raise OSError(number, os.strerror(number), path)


class _Current:
    watch: _Watch | None = None


_readlink, _open, _scandir = os.readlink, io.open, os.scandir


@contextmanager
def failing_reads(*roots: Path | str, choose: Choose = lambda read: None) -> Iterator[list[Read]]:
    """Context manager that lets reads below `roots` (folders, or URLs of `FailingFileSystem`) fail as `choose` says.

    Yields the list of all reads there, in order, which grows. Blocks cannot be nested.
    """
    assert _Current.watch is None
    hooks = {name: _hooked(name) for name in PATH_READS}
    with ExitStack() as patched:
        for name, hook in hooks.items():
            patched.enter_context(mock.patch.object(os, name, hook))
        for module in (io, builtins):
            patched.enter_context(mock.patch.object(module, "open", _open_hook))
        _Current.watch = watch = _Watch(tuple(str(root) for root in roots), choose)
        try:
            yield watch.reads
        finally:
            _Current.watch = None


def once(number: int, error: int) -> Choose:
    """The read of this number fails, and no other."""
    return lambda read: error if read.number == number else None


def _place(target: Any, dir_fd: int | None = None) -> str | None:
    """Absolute path of a path or descriptor; `None` for something else, such as a pipe."""
    if isinstance(target, int):
        try:
            return _readlink(f"/proc/self/fd/{target}")
        except OSError:
            return None
    name = os.fsdecode(target)
    return os.path.join(_place(dir_fd) or "", name) if dir_fd is not None else os.path.abspath(name)


def _hooked(name: str) -> Callable[..., Any]:
    really = getattr(os, name)

    def hook(target: Any = ".", *arguments: Any, **named: Any) -> Any:
        writes = name == "open" and arguments and arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (watch := _Current.watch) is not None and not writes:
            watch.ask(name, _place(target, named.get("dir_fd")))
        result = really(target, *arguments, **named)
        return _Entries(result, _place(target)) if name == "scandir" else result

    return hook


class _Entries:
    """Result of os.scandir whose entries are watched too."""

    def __init__(self, entries: Any, folder: str | None) -> None:
        self._entries, self._folder = entries, folder

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _Entry(next(self._entries), self._folder)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._entries.close()

    close = __exit__


class _Entry:
    def __init__(self, entry: Any, folder: str | None) -> None:
        self._entry, self._folder = entry, folder
        self.name, self.path = entry.name, entry.path

    def __fspath__(self) -> Any:
        return self.path

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._entry, name)

        def asked(**named: Any) -> Any:
            if (watch := _Current.watch) is not None and self._folder is not None:
                watch.ask(f"DirEntry.{name}", os.path.join(self._folder, os.fsdecode(self.name)))
            return attribute(**named)

        return asked


class _RawFile(io.FileIO):
    """A file whose every transfer is a read."""

    place: str | None = None

    def readinto(self, buffer: Any) -> Any:
        self._ask()
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> Any:
        self._ask()
        return super().read(size)

    def readall(self) -> Any:
        self._ask()
        return super().readall()

    def _ask(self) -> None:
        if (watch := _Current.watch) is not None:
            watch.ask("file.read", self.place)


def _open_hook(
    file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
    closefd: bool = True, opener: Any = None,
) -> Any:  # fmt: skip
    place = _place(file)
    if (watch := _Current.watch) is None or set("wax+") & set(mode) or place is None or not watch.covers(place):
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if not isinstance(file, int):
        watch.ask("open", place)
    raw = _RawFile(file, "r", closefd, opener)
    raw.place = place
    if buffering == 0:
        return raw
    buffered = io.BufferedReader(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class FailingFileSystem(MemoryFileSystem):
    """A store in memory, failing://, whose questions are reads; `exists` and `find` are fsspec's own, which take an
    error for an absence."""

    protocol = "failing"
    exists = AbstractFileSystem.exists
    find = AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("failing://"))

    def _ask(self, kind: str, path: str) -> None:
        if (watch := _Current.watch) is not None:
            watch.ask(kind, f"failing:/{self._strip_protocol(path)}")

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        self._ask("ls", path)
        return super().ls(path, detail, **named)

    def info(self, path: str, **named: Any) -> Any:
        self._ask("info", path)
        return super().info(path, **named)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> Any:
        self._ask("cat_file", path)
        return super().cat_file(path, start, end, **named)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **named: Any) -> Any:
        """Write without a read: `create` is checked against `store` directly."""
        if mode == "create" and self._strip_protocol(path) in self.store:
            raise FileExistsError(path)
        return super().pipe_file(path, value, **named)


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
