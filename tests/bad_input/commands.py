"""Commands of `meseta` in this process, on one rank or on every rank of a pool, and what they leave on the disk."""

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
"""What a command under `within` may take beyond what the process has already."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines of standard error that are no live progress."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run_here(*arguments: object) -> Ended:
    """`meseta ARGUMENTS` in this process; anything that would be a traceback is raised."""
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
    """Stands for the end of a rank's process."""


def run_on_rank(arguments: list[str]) -> Ended:
    """The same on a rank of a pool, whose process and process group must outlive the command."""

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
    """Every file under a folder with its content, of a huge one its size, every link with its target, all else with
    None."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> bytes | None:
    if path.is_symlink():
        return b"-> " + bytes(path.readlink())
    if not path.is_file():
        return None
    size = path.stat().st_size
    return path.read_bytes() if size < SPARE_BYTES // 8 else str(size).encode()


class TooLong(BaseException):
    """A command took longer than its test allows; no Exception, so that no command can turn it into a message."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise TooLong, naming `what`, where the body takes longer, and keep it from taking all memory; anything that
    escapes from the body is raised with `what` as its note."""

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
    """No file may grow beyond this: the system refuses the write, as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
