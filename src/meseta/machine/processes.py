"""Processes that this one starts, watches and stops: forks of it, and programs.

this process: imports torch, computes nothing, starts no thread of its own
     |-- fork --> rank 0: `meseta train ...`
     |-- fork --> rank 1: `meseta train ...`
     '- lifeline ----^ ends them when this process ends, however it does
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, NoReturn

from meseta.machine.environment_variables import environ
from meseta.machine.kernel import raise_oom_score

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end."""
_MAX_NAME_BYTES = 15
_scratch_files: dict[Path, int] = {}
"""Files that go with the process that made them, which stands beside each."""
Program = subprocess.Popen[bytes]
"""One that runs, or has ended."""


def fork(
    work: Callable[[], object],
    name: str,
    *,
    extra_environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
) -> BaseProcess:
    """Do `work` in a process of its own, a fork of this one, and return that.

    It ignores Ctrl-C, which a terminal sends to it too, and dies with this process. If memory runs out, the kernel
    kills it before this one, which can then report the loss. This one may have threads that
    wait for something, and must not have computed on several: OpenMP's do not survive in a fork.

    Args:
        work: what it does.
        name: what `top` shows; 15 characters of it.
        extra_environ: to the variables of its environment.
        stdout_fd: open descriptor of its standard output.
        stderr_fd: open descriptor of its standard error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(
        target=_run_child, name=name, args=(work, dict(extra_environ or {}), stdout_fd, stderr_fd)
    )
    _lifeline_pipe()
    # A signal that comes before the new process has said what it does with signals waits until then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def exec_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Be `python -P -m MODULE ARGUMENTS` from now on."""
    sys.stdout.flush()
    # -P: the folder that the user stands in may hold a torch.py
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def start_program(
    command: Sequence[str],
    extra_environ: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
) -> Program:
    """Start a program with some variables beside those of this process, and with open files that it inherits; the rest
    is as in subprocess.Popen. Raises OSError where the system starts none."""
    environment = {**environ, **extra_environ}
    return subprocess.Popen(
        command, env=environment, pass_fds=pass_fds, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0
    )


def run_program(
    command: Sequence[str], *, cwd: Path | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises OSError where the system starts none, and subprocess.TimeoutExpired."""
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, check=False)


@cache
def _lifeline_pipe() -> tuple[int, int]:
    """(end that the others read, end that this process holds until it is gone and never writes)."""
    return os.pipe()


def _run_child(work: Callable[[], object], added: Mapping[str, str], out: int, err: int) -> None:
    """In the new process: the work."""
    read, write = _lifeline_pipe()
    os.close(write)
    _lifeline_pipe.cache_clear()  # what this process starts hangs on this process
    threading.Thread(target=_exit_with_parent, args=(read,), name="meseta-lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.dup2(out, 1)
    os.dup2(err, 2)
    environ.update(added)
    raise_oom_score()
    Path("/proc/self/comm").write_text(multiprocessing.current_process().name[:_MAX_NAME_BYTES])
    work()


def _exit_with_parent(lifeline: int) -> None:
    """End this process when the one that started it dies: nobody would stop it otherwise."""
    os.read(lifeline, 1)
    exit_immediately(1)


def register_scratch_file(path: Path) -> None:
    """A file that goes with this process, unless `remove_scratch_file` comes first."""
    _scratch_files[path] = os.getpid()


def remove_scratch_file(path: Path) -> None:
    """Remove such a file; where it cannot be removed it stays."""
    _scratch_files.pop(path, None)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_scratch_files() -> None:
    """Of this process, at its end; what it was forked from keeps its own."""
    for path, process in tuple(_scratch_files.items()):
        if process == os.getpid():
            remove_scratch_file(path)


def exit_immediately(code: int) -> NoReturn:
    """End this process without taking the interpreter apart; its scratch files go."""
    remove_scratch_files()
    os._exit(code)
