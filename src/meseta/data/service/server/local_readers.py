"""Local dispatcher and reader processes of one command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meseta.data.service.credentials import CommandToken, Credentials, command_credentials, new_token
from meseta.data.service.keys import TlsKeys
from meseta.spec import MesetaError
from meseta.system.files import parse_json
from meseta.system.processes import Program, start_program

# The processes exit when their standard input is closed. The OS closes it however the parent process ends.

RESTART_DELAY_S = 5.0
"""Seconds before a reader is started again after one exited by itself or could not be started."""


class LocalReaders:
    """Reader processes of one dispatcher."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        """Take the URL and the credentials of the dispatcher. No reader is started before `scale_to`."""
        self._url, self._credentials = url, credentials
        self._programs: list[Program] = []
        self._draining: list[Program] = []
        self._restart_after_s = 0.0

    def scale_to(self, num_readers: int) -> None:
        """Start missing readers, and drain surplus readers, newest first. Returns immediately.

        A reader that exited by itself is replaced. A draining reader sends the requested windows before it exits.
        """
        for program in [p for p in self._programs if p.poll() is not None]:
            self._programs.remove(program)
            _close_stdin(program)
            self._restart_after_s = time.monotonic() + RESTART_DELAY_S
        for program in [p for p in self._draining if p.poll() is not None]:
            self._draining.remove(program)
            _close_stdin(program)
        while len(self._programs) > num_readers:
            surplus = self._programs.pop()
            surplus.send_signal(signal.SIGTERM)
            self._draining.append(surplus)
        while len(self._programs) < num_readers and time.monotonic() >= self._restart_after_s:
            try:
                self._programs.append(
                    _start("work", "--dispatcher", self._url, credentials=self._credentials, stdout=subprocess.DEVNULL)
                )
            except OSError as error:
                print(f"readers: a reader cannot be started ({error.strerror}); trying again", flush=True)
                self._restart_after_s = time.monotonic() + RESTART_DELAY_S

    def stop(self) -> None:
        """Stop all readers without draining them, and wait for their exit."""
        _stop([*self._programs, *self._draining])


@contextmanager
def local_readers(dataset: Path, min_readers: int, max_readers: int) -> Iterator[str]:
    """Context manager that runs a local dispatcher for one dataset with a pool of readers. Yields its URL.

    Only this process and its forks know the token. The processes end on exit, or when this process ends. Raises
    MesetaError if the dispatcher does not start.
    """
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
        except ValueError:  # The dispatcher has printed its error to the same stderr, and exited.
            raise MesetaError("--readers: the dispatcher did not start; see its error above") from None
        with command_credentials(url, credentials):
            yield url
    finally:
        _stop([dispatcher])


def _start(*arguments: str, credentials: Credentials, stdout: int) -> Program:
    """Start a command of `meseta readers`."""
    # The token is passed by standard input, because other users can list the arguments and variables of a process.
    keys = credentials if isinstance(credentials, TlsKeys) else None
    token_options = ["--token-stdin"] if keys is None else ["--keys", str(keys.folder)]
    command = [
        sys.executable,
        "-P",
        "-m",
        "meseta.cli.main",
        "readers",
        *arguments,
        *token_options,
        "--until-stdin-ends",
    ]
    program = start_program(command, {}, stdin=subprocess.PIPE, stdout=stdout, stderr=2)
    if keys is None:
        assert program.stdin is not None
        with suppress(BrokenPipeError):  # The program has exited.
            program.stdin.write(credentials.current_token() + b"\n")
    return program


def _stop(programs: list[Program]) -> None:
    # All inputs are closed before the first wait, so that the programs exit in parallel.
    for program in programs:
        _close_stdin(program)
    for program in programs:
        program.wait()


def _close_stdin(program: Program) -> None:
    """Make a program exit by closing its standard input."""
    assert program.stdin is not None
    program.stdin.close()
