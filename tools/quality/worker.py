"""Work of a child process: a `meseta` command or a function. Importing this module imports torch.

Children are forked from a server that has imported this module, so that they start without delay.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import torch._dynamo  # noqa: F401 (torch imports it for the first optimizer)

from meseta.spec import MesetaError
from meseta.train import open_trained, run_workload  # noqa: F401 (imported once for all children)

_run_meseta = entry_points(group="console_scripts")["meseta"].load()


def run_step(log: Path, step: list[str] | Callable[[], object]) -> None:
    """Run a step in this process, and append its output to `log`. A list has the arguments of a `meseta` command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process forwards Ctrl-C as SIGTERM.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if isinstance(step, list):
        sys.argv = ["meseta", *step]
        _run_meseta()
        return
    try:
        step()
    except (MesetaError, OSError) as error:
        sys.exit(f"error: {error}")


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
