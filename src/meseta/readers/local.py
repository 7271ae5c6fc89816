"""A dispatcher and readers for one command, on its machine; they end with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meseta.machine.processes import Program, start_program
from meseta.spec import MesetaError


@contextmanager
def local_readers(dataset: Path, num_readers: int) -> Iterator[str]:
    """The URL of a dispatcher of one dataset, which has so many readers. They end when this is left, and when this
    process does, however it does. Raises MesetaError where they do not start."""
    programs: list[Program] = []
    try:
        programs.append(_start("dispatch", "--data", str(dataset), "--listen", "127.0.0.1:0"))
        stdout = programs[0].stdout
        assert stdout is not None
        with stdout:
            said = stdout.readline().decode().split()
        if len(said) < 3:  # it has told why on the same stderr
            raise MesetaError(f"--readers {num_readers}: the dispatcher did not start; see the line above")
        url = said[2].rstrip(",")
        programs += [_start("work", "--dispatcher", url) for _ in range(num_readers)]
        for program in programs[1:]:
            assert program.stdout is not None
            with program.stdout:
                program.stdout.readline()
        yield url
    finally:
        for program in programs:
            assert program.stdin is not None
            program.stdin.close()
        for program in programs:
            program.wait()


def _start(*arguments: str) -> Program:
    command = [sys.executable, "-P", "-m", "meseta.cli.main", "readers", *arguments, "--until-stdin-ends"]
    return start_program(command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=2)
