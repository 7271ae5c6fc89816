"""Processes forked from a process that has imported torch, so that its import time is paid once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.process import BaseProcess

from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.system.processes import fork
from meseta.telemetry.watching.stalls import StallReporter

command_line: Callable[[], None] | None = None
"""Runs the command in `sys.argv`. `meseta.cli.main` sets it, because this module cannot import its importer."""


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a forked process.

    Args:
        arguments: Arguments of the command.
        name: Title of the process.
        variables: Environment variables to set in addition to those of this process.
        out: Descriptor used as stdout.
        err: Descriptor used as stderr.
    """
    _prepare_fork()
    return fork(partial(_run_command, arguments), name, extra_environ=variables, stdout_fd=out, stderr_fd=err)


def start_function(work: Callable[[], object], name: str, *, out: int = 1, err: int = 2) -> BaseProcess:
    """Start `work` in a forked process. If it raises MesetaError or OSError, the process prints it and exits with 1."""
    _prepare_fork()
    return fork(partial(_run_function, work), name, stdout_fd=out, stderr_fd=err)


def _prepare_fork() -> None:
    if StallReporter.current is not None:
        StallReporter.current.stop()  # A fork of a process with threads may deadlock.
    _preload_imports()


@cache
def _preload_imports() -> None:
    import meseta.cli.preload  # noqa: F401

    gc.collect()
    # Keep the garbage collector of forked processes from writing to memory pages that they share with this process.
    gc.freeze()


def _run_function(work: Callable[[], object]) -> None:
    try:
        work()
    except (MesetaError, OSError) as error:
        os.write(2, f"{ERROR_PREFIX}{error}\n".encode())
        sys.exit(1)


def _run_command(arguments: Sequence[str]) -> None:
    if command_line is None:
        raise RuntimeError("import meseta.cli.main before starting a command")
    sys.argv = ["meseta", *arguments]
    command_line()
