"""Runs commands of `meseta` in this process, on one rank or on a pool of ranks, and reads the files that they leave."""

from __future__ import annotations

import io
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from meseta.cli import main as entry
from meseta.comm import World

SPARE_BYTES = 2 << 30
"""Memory that a command under `within` may use in addition to that of the process."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines of standard error that are no live progress."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run_here(*arguments: object) -> Ended:
    """Run `meseta ARGUMENTS` in this process. Exceptions that would become a traceback are raised."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    argv = ["meseta", *map(str, arguments)]
    try:
        with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
            entry.main()
        code: object = 0
    except SystemExit as left:
        code = left.code
    finally:
        signal.signal(signal.SIGINT, handler)
    assert isinstance(code, int | None), code
    return Ended(code or 0, out.getvalue(), err.getvalue())


class _Left(BaseException):
    """Raised instead of ending a rank's process."""


def run_on_rank(arguments: list[str]) -> Ended:
    """Run a command on a rank of a pool. The process and its process group outlive the command."""

    def leave(code: int) -> None:
        raise _Left(code)

    with (
        mock.patch.object(entry, "exit_immediately", leave),
        mock.patch.object(World, "destroy_process_group", lambda: None),
    ):
        out, err = io.StringIO(), io.StringIO()
        try:
            with mock.patch.object(sys, "argv", ["meseta", *arguments]), redirect_stdout(out), redirect_stderr(err):
                entry.main()
            code = 0
        except _Left as left:
            code = left.args[0]
    return Ended(code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every path under a folder with its content, the size of a huge file, or the target of a link. Other paths
    have None."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> bytes | None:
    if path.is_symlink():
        return b"-> " + bytes(path.readlink())
    if not path.is_file():
        return None
    size = path.stat().st_size
    return path.read_bytes() if size < SPARE_BYTES // 8 else str(size).encode()


class TooLong(BaseException):
    """A command took longer than its test allows. It is no Exception, so that commands cannot catch it."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Context manager that raises TooLong if the body takes longer, and limits its memory. Exceptions of the body get
    `what` as note."""

    def ring(number: int, frame: object) -> None:
        raise TooLong(what)

    handler = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Context manager that limits the size of files. The system refuses larger writes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
