"""Jobs in child processes, several at a time. A crash of a job does not end the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from meseta.spec import MesetaError

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for ended processes."""
SAME_SIGNAL_WINDOW_S = 1.0
"""Seconds after the first signal within which another one counts as the same request."""
Step = list[str] | Callable[[], object]
"""Arguments of a `meseta` command, or a function that can be pickled."""
_run_meseta = entry_points(group="console_scripts")["meseta"].load()


class StopSignals:
    """Signals SIGTERM and Ctrl-C of this process, recorded from the creation of this object."""

    def __init__(self) -> None:
        self.first_signal: int | None = None
        """Number of the first signal, or `None` if there was none."""
        self.is_repeated = False
        """Whether another signal arrived after `SAME_SIGNAL_WINDOW_S`."""
        self._first_s = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first_signal is None:
            self.first_signal, self._first_s = number, time.monotonic()
        elif time.monotonic() - self._first_s > SAME_SIGNAL_WINDOW_S:
            self.is_repeated = True


@dataclass
class Job:
    """A sequence of steps in processes. Each one starts after the previous one has succeeded."""

    name: str
    log: Path
    """File to which the output of all steps is appended."""
    steps: Sequence[Step]
    exit_code: int = -1
    """Exit code of the last process, or 1 if it succeeded and steps remain. 0 if all steps succeeded."""
    seconds: float = 0.0
    """Time from the start of the job to its end."""
    _process: BaseProcess | None = None
    _num_started: int = 0
    _started_s: float = 0.0
    _has_forwarded_signal: bool = False

    def start_next_step(self) -> None:
        """Start a process for the next step."""
        # A server that has imported these modules forks the processes, so that they start without delay.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "tools.quality.scoring"])
        self._started_s = self._started_s or time.monotonic()
        self._process = context.Process(target=_run_step, args=(self.log, self.steps[self._num_started]))
        self._process.start()
        self._num_started += 1

    def poll(self, signals: StopSignals) -> bool:
        """Forward a signal to the process, or start the next step if it has ended. Return whether the job has ended."""
        assert self._process is not None  # Set by start_next_step.
        code = self._process.exitcode
        if code is None:
            if signals.is_repeated:
                self._process.kill()
            elif signals.first_signal is not None and not self._has_forwarded_signal:
                self._has_forwarded_signal = True
                self._process.terminate()
            return False
        is_last = self._num_started == len(self.steps)
        if code == 0 and not is_last and signals.first_signal is None:
            self.start_next_step()
            return False
        self.exit_code, self.seconds = code or int(not is_last), time.monotonic() - self._started_s
        return True

    def kill(self) -> None:
        """Kill the process of the job."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def run_jobs(jobs: Sequence[Job], num_at_a_time: int, signals: StopSignals) -> Iterator[Job]:
    """Run jobs in order, up to `num_at_a_time` simultaneously, and yield each job when it ends.

    A signal is forwarded to the running jobs as SIGTERM, and a training run saves a checkpoint before it ends. After
    that no job or step starts. A second signal kills the running jobs.
    """
    waiting, running = list(jobs), list[Job]()
    try:
        while running or (waiting and signals.first_signal is None):
            while waiting and len(running) < num_at_a_time and signals.first_signal is None:
                running.append(waiting.pop(0))
                running[-1].start_next_step()
            for job in list(running):
                if job.poll(signals):
                    running.remove(job)
                    yield job
            time.sleep(POLL_INTERVAL_S)
    finally:
        # The caller may stop iterating, or a step may fail to start, while other jobs are running.
        for job in running:
            job.kill()


def _run_step(log: Path, step: Step) -> None:
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


def last_output_line(log: Path) -> str:
    """Return the last line that a failed process printed, without the prefix of errors."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"
