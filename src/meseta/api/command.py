"""Run a command of `meseta` in a child process, so that threads and devices of a notebook do not matter to it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence

from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.system.processes import Program, start_program
from meseta.system.ranks import is_distributed

NUM_LAST_LINES = 5
"""Number of lines in the error of a command that ended without an error line."""


def run_command(arguments: Sequence[str]) -> None:
    """Run `meseta ARGUMENTS` and print its output here, line by line.

    Ctrl-C reaches all ranks of the command, and is raised again after they have ended. If this process dies, the
    command is killed, and its run can be resumed.
    Raises MesetaError with the error line of the command, or if this process is a rank.
    """
    if is_distributed():
        raise MesetaError(
            f"meseta {arguments[0]}: this process is a rank of torchrun; call it in one process with nproc=N"
        )
    # -P excludes the working directory from the search for modules, as the installed command does.
    command = [sys.executable, "-P", "-m", "meseta.api.child", *arguments]
    child = start_program(
        command,
        {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    with child, io.TextIOWrapper(io.BufferedReader(child.stdout), errors="replace") as output:  # type: ignore[type-var]
        try:
            lines, error = _print_lines(output)
            code = child.wait()
        except BaseException as stopped:
            # Ctrl-C in a terminal reaches a whole process group, so that all ranks save and stop.
            os.killpg(child.pid, signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else signal.SIGTERM)
            _drain(child, output)
            raise
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code != 0:
        raise MesetaError(error or f"meseta {arguments[0]} ended with code {code}: {' | '.join(lines)}")


def _print_lines(output: Iterable[str]) -> tuple[Sequence[str], str | None]:
    """Print the output of a command. Return its last lines, and its last error line without the prefix."""
    lines, error = deque[str](maxlen=NUM_LAST_LINES), None
    for line in output:
        if line.startswith(ERROR_PREFIX):
            error = line.removeprefix(ERROR_PREFIX).rstrip("\n")
            continue
        lines.append(line.rstrip("\n"))
        print(line, end="", flush=True)
    return lines, error


def _drain(child: Program, output: Iterable[str]) -> None:
    """Print what a process says until it ends. A second Ctrl-C kills its process group."""
    try:
        _print_lines(output)
        child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
