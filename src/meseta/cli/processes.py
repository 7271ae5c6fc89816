"""`meseta ARGUMENTS` in processes forked from this one once it has imported torch: that import is paid once.

this process: imports torch, computes nothing, starts no thread of its own
     |-- fork --> rank 0: `meseta train ...`
     |-- fork --> rank 1: `meseta train ...`
     '- lifeline ----^ ends them when this process ends, however it does
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end."""
SHARED = ("meseta.train.trainer", "meseta.train.trained", "meseta.train.predictions", "meseta.train.verify", "sympy")
_NAME_BYTES = 15


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a process of its own, and return that.

    It ignores Ctrl-C, which a terminal sends to it too, and dies with this process. This one may have threads that
    wait for something, and must not have computed on several: OpenMP's do not survive in a fork.

    Args:
        arguments: of the command.
        name: what `top` shows; 15 characters of it.
        variables: added to the environment.
        out: open descriptor of its standard output.
        err: open descriptor of its standard error.
    """
    _share_imports()
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(
        target=_run, name=name, args=(arguments, dict(variables or {}), out, err)
    )
    _lifeline()
    # A signal that comes before the new process has said what it does with signals waits until then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def begin_anew(arguments: Sequence[str]) -> NoReturn:
    """Become `meseta ARGUMENTS`: a process that has computed cannot start commands any more."""
    sys.stdout.flush()
    # -P: the folder that the user stands in may hold a torch.py
    os.execv(sys.executable, [sys.executable, "-P", "-m", "meseta.cli.main", *arguments])


@cache
def _share_imports() -> None:
    for name in SHARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a fork does not write into pages that it shares with the others


@cache
def _lifeline() -> tuple[int, int]:
    """(end that the others read, end that this process holds until it is gone and never writes)."""
    return os.pipe()


def _run(arguments: Sequence[str], variables: Mapping[str, str], out: int, err: int) -> None:
    """In the new process: the command."""
    read, write = _lifeline()
    os.close(write)
    _lifeline.cache_clear()  # what this process starts hangs on this process
    threading.Thread(target=_end_with, args=(read,), name="meseta-lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(variables)
    Path("/proc/self/comm").write_text(multiprocessing.current_process().name[:_NAME_BYTES])
    sys.argv = ["meseta", *arguments]
    importlib.import_module("meseta.cli.main").main()


def _end_with(lifeline: int) -> None:
    """End this process when the one that started it dies: nobody would stop it otherwise."""
    os.read(lifeline, 1)
    os._exit(1)
