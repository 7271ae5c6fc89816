"""State and signal handlers of processes of this host, read from /proc."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, NoReturn

from meseta.system.environment_variables import environ
from meseta.system.kernel import raise_oom_score

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessState:
    """State of an existing process."""

    state_code: str
    """State as in `ps`: R, S, D, T, t, Z or X."""
    start_ticks: int
    """Start time of the process in clock ticks since boot. It distinguishes processes that had the same pid."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended and has not been reaped yet."""
        return self.state_code in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process. SIGCONT continues it."""
        return self.state_code == "T"

    @property
    def blocked_reason(self) -> str:
        """Description of why the process cannot run, such as 'stopped by a signal'. It is empty if it can run."""
        return {
            "T": "stopped by a signal",
            "t": "stopped by a debugger",
            "D": "blocked in the kernel, for example by a disk that does not respond",
        }.get(self.state_code, "")


def read_process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or `None` if it does not exist or cannot be read."""
    try:
        # The name of the program may contain spaces and parentheses, so parse the fields after the last one.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessState(state_code=fields[0], start_ticks=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def process_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or `None` if it is unknown."""
    state = read_process_state(pid)
    return None if state is None else state.start_ticks


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for signal `number`."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        # Bit n - 1 of the mask belongs to signal n.
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return False
    return 0 < number <= 64 and bool(caught >> (number - 1) & 1)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The kernel truncates longer names in /proc/PID/comm.
_MAX_NAME_BYTES = 15
_scratch_files: dict[Path, int] = {}
"""Process that owns each scratch file. The file is removed when the process ends."""
Program = subprocess.Popen[bytes]


def fork(
    work: Callable[[], object],
    name: str,
    *,
    extra_environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
) -> BaseProcess:
    """Run `work` in a fork of this process, and return the new process.

    The child ignores Ctrl-C and ends when this process ends. If memory runs out, the kernel kills the child first, so
    that this process can report it. Call this function before OpenMP has started threads, because they do not survive a
    fork. Threads that only wait are allowed.

    `name` is shown in `top`, truncated to 15 bytes. `extra_environ` is added to the environment. The descriptors
    `stdout_fd` and `stderr_fd` replace standard output and error of the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(
        target=_run_child, name=name, args=(work, dict(extra_environ or {}), stdout_fd, stderr_fd)
    )
    _lifeline_pipe()
    # Block signals until the new process has installed its handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def exec_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -P -m MODULE ARGUMENTS`."""
    sys.stdout.flush()
    # -P excludes the current folder from the search path, because it may contain a file such as torch.py.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def start_program(
    command: Sequence[str],
    extra_environ: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    start_new_session: bool = False,
) -> Program:
    """Start a program with additional environment variables and inherited file descriptors.

    The other parameters are those of subprocess.Popen. Raises OSError if the program cannot be started.
    """
    environment = {**environ, **extra_environ}
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        bufsize=0,
        start_new_session=start_new_session,
    )


def run_program(
    command: Sequence[str], *, cwd: Path | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends. Raises OSError if it cannot be started, and subprocess.TimeoutExpired."""
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, check=False)


@cache
def _lifeline_pipe() -> tuple[int, int]:
    """Return (end that the children read, end that this process keeps open and never writes)."""
    return os.pipe()


def _run_child(work: Callable[[], object], added: Mapping[str, str], out: int, err: int) -> None:
    read, write = _lifeline_pipe()
    os.close(write)
    _lifeline_pipe.cache_clear()  # Children of this process get a lifeline to this process.
    exit_with_parent(read)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.dup2(out, 1)
    os.dup2(err, 2)
    environ.update(added)
    raise_oom_score()
    Path("/proc/self/comm").write_text(multiprocessing.current_process().name[:_MAX_NAME_BYTES])
    work()


def exit_with_parent(lifeline: int) -> None:
    """Make this process exit when the parent closes its end of a pipe to which it never writes."""
    threading.Thread(target=_wait_for_parent, args=(lifeline,), name="meseta-lifeline", daemon=True).start()


def _wait_for_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # Returns when the parent's end of the pipe is closed, also if the parent was killed.
    exit_immediately(1)


def register_scratch_file(path: Path) -> None:
    """Register a file to be removed when this process ends."""
    _scratch_files[path] = os.getpid()


def remove_scratch_file(path: Path) -> None:
    """Remove a scratch file. Errors are ignored."""
    _scratch_files.pop(path, None)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_scratch_files() -> None:
    """Remove the scratch files of this process. A fork does not remove those of its parent."""
    for path, process in tuple(_scratch_files.items()):
        if process == os.getpid():
            remove_scratch_file(path)


def exit_immediately(code: int) -> NoReturn:
    """Exit this process without shutting down the interpreter. Scratch files are removed first."""
    remove_scratch_files()
    os._exit(code)
