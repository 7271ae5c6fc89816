"""Jobs in child processes, several at a time. A crash of a job does not end the command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from meseta.cli.launch import StopSignals, start_command, start_function
from meseta.errors import ERROR_PREFIX

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for ended processes."""
StartProcess = Callable[[int], BaseProcess]
"""Function that starts a process whose stdout and stderr are the given descriptor."""


def command_step(arguments: Sequence[str], title: str) -> StartProcess:
    """Return a function that starts a `meseta` command in a process called `title`."""
    return partial(_redirect_output, partial(start_command, arguments, title))


def function_step(work: Callable[[], object], title: str) -> StartProcess:
    """Return a function that starts `work` in a process called `title`."""
    return partial(_redirect_output, partial(start_function, work, title))


def _redirect_output(start: Callable[..., BaseProcess], out: int) -> BaseProcess:
    return start(out=out, err=out)


@dataclass(frozen=True)
class CommandJob:
    """A sequence of processes. Each one starts after the previous one has succeeded."""

    name: str
    log: Path
    """File to which the output of all steps is appended."""
    steps: Sequence[StartProcess]


@dataclass
class _RunningJob:
    job: CommandJob
    started_s: float = field(default_factory=time.monotonic)
    num_started: int = 0
    process: BaseProcess | None = None
    has_forwarded_signal: bool = False

    def start_next_step(self) -> None:
        # Appending keeps the output of the previous steps.
        with self.job.log.open("ab") as file:
            self.process = self.job.steps[self.num_started](file.fileno())
        self.num_started += 1


@dataclass(frozen=True)
class FinishedJob:
    """Result of a job that has ended."""

    job: CommandJob
    exit_code: int
    """Exit code of the last process, or 1 if it succeeded and steps remain. 0 if all steps succeeded."""
    seconds: float


def run_jobs(jobs: Sequence[CommandJob], num_at_a_time: int, signals: StopSignals) -> Iterator[FinishedJob]:
    """Run jobs in order, up to `num_at_a_time` simultaneously, and yield the result of each job when it ends.

    SIGTERM and Ctrl-C are forwarded to the running jobs, which may save their state before they end. After that no job
    or step starts. A second signal kills the running jobs.
    """
    waiting, running = list(jobs), list[_RunningJob]()
    try:
        while running or (waiting and signals.first_signal is None):
            while waiting and len(running) < num_at_a_time and signals.first_signal is None:
                running.append(_RunningJob(waiting.pop(0)))
                running[-1].start_next_step()
            # Iterate over a copy, because ended jobs are removed from the list.
            for one in list(running):
                process = one.process
                assert process is not None  # Set by start_next_step.
                if process.exitcode is None:
                    _forward_signal(one, process, signals)
                    continue
                process.join()
                if process.exitcode == 0 and one.num_started < len(one.job.steps) and signals.first_signal is None:
                    one.start_next_step()
                    continue
                running.remove(one)
                is_whole = one.num_started == len(one.job.steps)
                yield FinishedJob(one.job, process.exitcode or int(not is_whole), time.monotonic() - one.started_s)
            time.sleep(POLL_INTERVAL_S)
    finally:
        # The caller may stop iterating, or a step may fail to start, while other jobs are running.
        for one in running:
            if one.process is not None:
                one.process.kill()
                one.process.join()


def _forward_signal(one: _RunningJob, process: BaseProcess, signals: StopSignals) -> None:
    if signals.is_repeated:
        process.kill()
    elif signals.first_signal is not None and not one.has_forwarded_signal:
        one.has_forwarded_signal = True
        process.terminate()


def last_output_line(log: Path) -> str:
    """Return the last line that a failed process printed, without the prefix of errors."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix(ERROR_PREFIX) if lines else "it printed nothing"
