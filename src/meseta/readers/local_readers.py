"""Readers of this machine, as many as are wanted, and a dispatcher that has them, for one command; they end with the
process that started them, however that does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meseta.data.read.served.credentials import CommandToken, Credentials, command_credentials, new_token
from meseta.data.read.served.keys import TlsKeys
from meseta.machine.files import parse_json
from meseta.machine.processes import Program, start_program
from meseta.spec import MesetaError

RESTART_DELAY_S = 5.0
"""After a reader has ended by itself."""


class LocalReaders:
    """Readers of one dispatcher, which this process starts and ends."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        """`url` and `credentials`: of the dispatcher."""
        self._url, self._credentials = url, credentials
        self._programs: list[Program] = []
        self._draining: list[Program] = []
        self._restart_after_s = 0.0

    def scale_to(self, wanted: int) -> None:
        """Start what is missing, and tell those that are too many, the youngest first, to leave, which they do when
        they have given what was asked of them. One that has ended by itself is missing."""
        for program in [p for p in self._programs if p.poll() is not None]:
            self._programs.remove(program)
            _close_stdin(program)
            self._restart_after_s = time.monotonic() + RESTART_DELAY_S
        for program in [p for p in self._draining if p.poll() is not None]:
            self._draining.remove(program)
            _close_stdin(program)
        while len(self._programs) > wanted:
            leaving = self._programs.pop()
            leaving.send_signal(signal.SIGTERM)
            self._draining.append(leaving)
        while len(self._programs) < wanted and time.monotonic() >= self._restart_after_s:
            try:
                self._programs.append(
                    _start("work", "--dispatcher", self._url, credentials=self._credentials, stdout=subprocess.DEVNULL)
                )
            except OSError as error:
                print(f"readers: a reader cannot be started ({error.strerror}); trying again", flush=True)
                self._restart_after_s = time.monotonic() + RESTART_DELAY_S

    def stop(self) -> None:
        """All of them, at once."""
        _stop([*self._programs, *self._draining])


@contextmanager
def local_readers(dataset: Path, min_readers: int, max_readers: int) -> Iterator[str]:
    """The URL of a dispatcher of one dataset, which has so many readers; only this process and its forks know its
    token. They end when this is left, and when this process does, however it does. Raises MesetaError where they do not
    start."""
    options = ("--data", str(dataset), "--listen", "127.0.0.1:0", "--json")
    bounds, credentials = (
        ("--min", str(min_readers), "--max", str(max_readers), "--start-local"),
        CommandToken(new_token()),
    )
    dispatcher = _start("dispatch", *options, *bounds, credentials=credentials, stdout=subprocess.PIPE)
    try:
        assert dispatcher.stdout is not None
        with dispatcher.stdout:
            line = dispatcher.stdout.readline()
        try:
            url = parse_json(line)["url"]
        except ValueError:  # it has ended, and printed the reason on the same stderr
            raise MesetaError("--readers: the dispatcher did not start; see the line above") from None
        with command_credentials(url, credentials):
            yield url
    finally:
        _stop([dispatcher])


def _start(*arguments: str, credentials: Credentials, stdout: int) -> Program:
    """Start a command of `meseta readers`. A token goes through its standard input, since others can list arguments and
    variables of a process."""
    keys = credentials if isinstance(credentials, TlsKeys) else None
    way = ["--token-stdin"] if keys is None else ["--keys", str(keys.folder)]
    command = [sys.executable, "-P", "-m", "meseta.cli.main", "readers", *arguments, *way, "--until-stdin-ends"]
    program = start_program(command, {}, stdin=subprocess.PIPE, stdout=stdout, stderr=2)
    if keys is None:
        assert program.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            program.stdin.write(credentials.current_token() + b"\n")
    return program


def _stop(programs: list[Program]) -> None:
    for program in programs:
        _close_stdin(program)
    for program in programs:
        program.wait()


def _close_stdin(program: Program) -> None:
    """Close its standard input, with which it ends."""
    assert program.stdin is not None
    program.stdin.close()
