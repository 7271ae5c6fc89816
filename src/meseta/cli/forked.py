"""`meseta ARGUMENTS` in processes forked from this one once it has imported torch: that import is paid once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.process import BaseProcess

from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.machine.processes import fork
from meseta.telemetry.watching.stalls import StallReporter


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a process of its own, with these variables beside the present ones: see
    meseta.machine.processes.fork."""
    _prepare_fork()
    return fork(partial(_run_command, arguments), name, extra_environ=variables, stdout_fd=out, stderr_fd=err)


def start_function(work: Callable[[], object], name: str, *, out: int = 1, err: int = 2) -> BaseProcess:
    """Do `work` in such a process, which ends with code 1, and an error in one line, where a MesetaError is raised."""
    _prepare_fork()
    return fork(partial(_run_function, work), name, stdout_fd=out, stderr_fd=err)


def _prepare_fork() -> None:
    if StallReporter.current is not None:
        StallReporter.current.stop()  # a fork with threads may deadlock
    _preload_imports()


@cache
def _preload_imports() -> None:
    import meseta.cli.preload  # noqa: F401

    gc.collect()
    gc.freeze()  # the collector of a fork does not write into pages that it shares with the others


def _run_function(work: Callable[[], object]) -> None:
    try:
        work()
    except (MesetaError, OSError) as error:
        os.write(2, f"{ERROR_PREFIX}{error}\n".encode())
        sys.exit(1)


def _run_command(arguments: Sequence[str]) -> None:
    from meseta.cli.main import main

    sys.argv = ["meseta", *arguments]
    main()
