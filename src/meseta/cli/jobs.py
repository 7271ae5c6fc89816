"""Work in processes of its own, several at a time, so that whatever befalls one does not befall the command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from meseta.cli.forked import start_command, start_work
from meseta.cli.launch import StopSignals
from meseta.errors import ERROR_PREFIX

LOOK_S = 0.05
"""Between looks at what has ended."""
Start = Callable[[int], BaseProcess]
"""Starts a process that prints to an open descriptor."""


def command_step(arguments: Sequence[str], title: str) -> Start:
    """A `meseta` command, as a process called `title`."""
    return partial(_printing, partial(start_command, arguments, title))


def work_step(work: Callable[[], object], title: str) -> Start:
    """`work`, as a process called `title`."""
    return partial(_printing, partial(start_work, work, title))


def _printing(start: Callable[..., BaseProcess], out: int) -> BaseProcess:
    return start(out=out, err=out)


@dataclass(frozen=True)
class CommandJob:
    """Processes, one after the other, as long as they end well."""

    name: str
    log: Path
    """To which what they print is added."""
    steps: Sequence[Start]


@dataclass
class _Running:
    job: CommandJob
    began_s: float = field(default_factory=time.monotonic)
    num_begun: int = 0
    process: BaseProcess | None = None
    told: bool = False

    def go_on(self) -> None:
        """Begin the next step."""
        with self.job.log.open("ab") as file:
            self.process = self.job.steps[self.num_begun](file.fileno())
        self.num_begun += 1


@dataclass(frozen=True)
class DoneJob:
    """One that has ended."""

    job: CommandJob
    code: int
    """Of its last process; 0 where all have ended well."""
    seconds: float


def run_jobs(jobs: Sequence[CommandJob], num_at_a_time: int, signals: StopSignals) -> Iterator[DoneJob]:
    """Run them in order, some at a time, and give each when it has ended.

    SIGTERM and Ctrl-C to this process are passed on, and waited for while the others save; a second one kills them.
    Nothing is begun after the first.
    """
    waiting, running = list(jobs), list[_Running]()
    try:
        while running or (waiting and signals.number is None):
            while waiting and len(running) < num_at_a_time and signals.number is None:
                running.append(_Running(waiting.pop(0)))
                running[-1].go_on()
            for one in list(running):
                process = one.process
                assert process is not None  # begun above
                if process.exitcode is None:
                    _pass_on(one, process, signals)
                    continue
                process.join()
                if process.exitcode == 0 and one.num_begun < len(one.job.steps) and signals.number is None:
                    one.go_on()
                    continue
                running.remove(one)
                is_whole = one.num_begun == len(one.job.steps)
                yield DoneJob(one.job, process.exitcode or int(not is_whole), time.monotonic() - one.began_s)
            time.sleep(LOOK_S)
    finally:
        for one in running:
            if one.process is not None:
                one.process.kill()
                one.process.join()


def _pass_on(one: _Running, process: BaseProcess, signals: StopSignals) -> None:
    if signals.again:
        process.kill()
    elif signals.number is not None and not one.told:
        one.told = True
        process.terminate()


def last_words(log: Path) -> str:
    """The last line that a failed process printed, without the prefix of errors."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix(ERROR_PREFIX) if lines else "it printed nothing"
