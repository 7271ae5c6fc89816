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
from meseta.telemetry.watching.stalls import StallReports


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a process of its own, with these variables beside the present ones: see
    meseta.machine.processes.fork."""
    _prepare_fork()
    return fork(partial(_run_command, arguments), name, added=variables, out=out, err=err)


def start_work(work: Callable[[], object], name: str, *, out: int = 1, err: int = 2) -> BaseProcess:
    """Do `work` in such a process, which ends with code 1, and an error in one line, where a MesetaError is raised."""
    _prepare_fork()
    return fork(partial(_do, work), name, out=out, err=err)


def _prepare_fork() -> None:
    if StallReports.current is not None:
        StallReports.current.end()  # a fork with threads may deadlock
    _share_imports()


@cache
def _share_imports() -> None:
    import meseta.cli.preloaded  # noqa: F401

    gc.collect()
    gc.freeze()  # the collector of a fork does not write into pages that it shares with the others


def _do(work: Callable[[], object]) -> None:
    try:
        work()
    except (MesetaError, OSError) as error:
        os.write(2, f"{ERROR_PREFIX}{error}\n".encode())
        sys.exit(1)


def _run_command(arguments: Sequence[str]) -> None:
    from meseta.cli.main import main

    sys.argv = ["meseta", *arguments]
    main()
