"""Readers of this machine, as many as are wanted, and a dispatcher that has them, for one command; they end with the
process that started them, however that does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meseta.machine.processes import Program, start_program
from meseta.spec import MesetaError

TRY_AGAIN_S = 5.0
"""After a reader has ended by itself."""


class LocalReaders:
    """Readers of one dispatcher, which this process starts and ends."""

    def __init__(self, url: str, keys: Path | None = None) -> None:
        """`url`: of the dispatcher; `keys`: the folder of keys that it was started with."""
        self._arguments = ("work", "--dispatcher", url, *(() if keys is None else ("--keys", str(keys))))
        self._programs: list[Program] = []
        self._leaving: list[Program] = []
        self._not_before_s = 0.0

    def follow(self, wanted: int) -> None:
        """Start what is missing, and tell those that are too many, the youngest first, to leave, which they do when
        they have given what was asked of them. One that has ended by itself is missing."""
        for program in [p for p in self._programs if p.poll() is not None]:
            self._programs.remove(program)
            _hang_up(program)
            self._not_before_s = time.monotonic() + TRY_AGAIN_S
        for program in [p for p in self._leaving if p.poll() is not None]:
            self._leaving.remove(program)
            _hang_up(program)
        while len(self._programs) > wanted:
            leaving = self._programs.pop()
            leaving.send_signal(signal.SIGTERM)
            self._leaving.append(leaving)
        while len(self._programs) < wanted and time.monotonic() >= self._not_before_s:
            try:
                self._programs.append(_start(*self._arguments, stdout=subprocess.DEVNULL))
            except OSError as error:
                print(f"readers: a reader cannot be started ({error.strerror}); trying again", flush=True)
                self._not_before_s = time.monotonic() + TRY_AGAIN_S

    def end(self) -> None:
        """All of them, at once."""
        _end([*self._programs, *self._leaving])


@contextmanager
def local_readers(dataset: Path, least: int, most: int) -> Iterator[str]:
    """The URL of a dispatcher of one dataset, which has so many readers. They end when this is left, and when this
    process does, however it does. Raises MesetaError where they do not start."""
    bounds = ("--min", str(least), "--max", str(most), "--start-local")
    dispatcher = _start("dispatch", "--data", str(dataset), "--listen", "127.0.0.1:0", *bounds, stdout=subprocess.PIPE)
    try:
        assert dispatcher.stdout is not None
        with dispatcher.stdout:
            said = dispatcher.stdout.readline().decode().split()
        if len(said) < 3:  # it has told why on the same stderr
            raise MesetaError("--readers: the dispatcher did not start; see the line above")
        yield said[2].rstrip(",")
    finally:
        _end([dispatcher])


def _start(*arguments: str, stdout: int) -> Program:
    command = [sys.executable, "-P", "-m", "meseta.cli.main", "readers", *arguments, "--until-stdin-ends"]
    return start_program(command, {}, stdin=subprocess.PIPE, stdout=stdout, stderr=2)


def _end(programs: list[Program]) -> None:
    for program in programs:
        _hang_up(program)
    for program in programs:
        program.wait()


def _hang_up(program: Program) -> None:
    """Close its standard input, with which it ends."""
    assert program.stdin is not None
    program.stdin.close()
