"""Programs that run beside the tests, from the first test on: each is one process, and so are most tests.

A test names its program by a mark, and asks the fixture `beside` how it ended:

    @pytest.mark.beside(PROGRAM)
    def test_it(beside):
        assert beside(PROGRAM).returncode == 0
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from source_tree import ROOT

Finished = subprocess.CompletedProcess[str]
PATIENCE_S = 280.0


@dataclass(frozen=True)
class Program:
    """A command, run in an empty folder that sees examples/, as a reader in the checkout does."""

    command: tuple[str, ...]


def run(program: Program, folder: Path, processes: set[subprocess.Popen[str]]) -> Finished:
    """Run it to its end; it is among `processes` as long as it runs."""
    (folder / "examples").symlink_to(ROOT / "examples")
    pipe = subprocess.PIPE
    # The tests go first: nobody waits for these yet.
    command = ["nice", "-n", "5", *program.command]
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        processes.add(process)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            kill(process)
            raise
        finally:
            processes.discard(process)
    return Finished(program.command, process.returncode, out, err)


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class Beside:
    """Runs programs in their order, as many at a time as the tests leave processors."""

    def __init__(self, programs: Iterable[Program], make_folder: Callable[[], Path], num_workers: int) -> None:
        self._pool = ThreadPoolExecutor(num_workers)
        self._make_folder = make_folder
        self._processes: set[subprocess.Popen[str]] = set()
        self._runs: dict[Program, Future[Finished]] = {}
        for program in programs:
            if program not in self._runs:
                self._runs[program] = self._pool.submit(run, program, make_folder(), self._processes)

    def __call__(self, program: Program) -> Finished:
        """How it ended. One that has not begun is run here and now."""
        waiting = self._runs.get(program)
        if waiting is None or waiting.cancel():
            found = self._runs[program] = Future()
            found.set_result(run(program, self._make_folder(), self._processes))
        return self._runs[program].result()

    def close(self) -> None:
        """End what still runs, of a session that was stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            kill(process)
        self._pool.shutdown()
