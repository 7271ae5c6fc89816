"""Jobs in child processes, several at a time. A crash of a job does not end the command."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for ended processes."""
SAME_SIGNAL_WINDOW_S = 1.0
"""Seconds after the first signal within which another one counts as the same request."""
Step = list[str] | Callable[[], object]
"""Arguments of a `meseta` command, or a function that can be pickled."""


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


@dataclass(frozen=True)
class Job:
    """A sequence of steps in processes. Each one starts after the previous one has succeeded."""

    name: str
    log: Path
    """File to which the output of all steps is appended."""
    steps: Sequence[Step]


@dataclass(frozen=True)
class FinishedJob:
    """Result of a job that has ended."""

    job: Job
    exit_code: int
    """Exit code of the last process, or 1 if it succeeded and steps remain. 0 if all steps succeeded."""
    seconds: float


@dataclass
class _RunningJob:
    job: Job
    process: BaseProcess
    started_s: float = field(default_factory=time.monotonic)
    num_started: int = 1
    has_forwarded_signal: bool = False

    def forward(self, signals: StopSignals) -> None:
        if signals.is_repeated:
            self.process.kill()
        elif signals.first_signal is not None and not self.has_forwarded_signal:
            self.has_forwarded_signal = True
            self.process.terminate()


def run_jobs(jobs: Sequence[Job], num_at_a_time: int, signals: StopSignals) -> Iterator[FinishedJob]:
    """Run jobs in order, up to `num_at_a_time` simultaneously, and yield the result of each job when it ends.

    A signal is forwarded to the running jobs as SIGTERM, and a training run saves a checkpoint before it ends. After
    that no job or step starts. A second signal kills the running jobs.
    """
    waiting, running = list(jobs), list[_RunningJob]()
    try:
        while running or (waiting and signals.first_signal is None):
            while waiting and len(running) < num_at_a_time and signals.first_signal is None:
                job = waiting.pop(0)
                running.append(_RunningJob(job, _start(job, 0)))
            for one in list(running):
                code = one.process.exitcode
                if code is None:
                    one.forward(signals)
                elif code == 0 and one.num_started < len(one.job.steps) and signals.first_signal is None:
                    one.process = _start(one.job, one.num_started)
                    one.num_started += 1
                else:
                    running.remove(one)
                    is_whole = one.num_started == len(one.job.steps)
                    yield FinishedJob(one.job, code or int(not is_whole), time.monotonic() - one.started_s)
            time.sleep(POLL_INTERVAL_S)
    finally:
        # The caller may stop iterating, or a step may fail to start, while other jobs are running.
        for one in running:
            one.process.kill()
            one.process.join()


def _start(job: Job, number: int) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.quality.worker"])
    process = context.Process(target=_run_step, args=(job.log, job.steps[number]), name=f"quality: {job.name}")
    process.start()
    return process


def _run_step(log: Path, step: Step) -> None:
    from tools.quality.worker import run_step  # The process of the command itself does not import torch.

    run_step(log, step)


def last_output_line(log: Path) -> str:
    """Return the last line that a failed process printed, without the prefix of errors."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"
