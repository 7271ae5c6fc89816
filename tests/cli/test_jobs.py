"""Jobs in child processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meseta.cli.jobs import CommandJob, command_step, run_jobs
from meseta.cli.launch import StopSignals


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_jobs_stop_at_a_failed_step(tmp_path: Path) -> None:
    works, fails = (command_step(words, "job") for words in (["--version"], ["config", "zzz"]))
    jobs = [
        CommandJob(name, tmp_path / f"{name}.log", steps)
        for name, steps in {"good": [works, works], "bad": [works, fails, works], "last": [works]}.items()
    ]
    codes = {done.job.name: done.exit_code for done in run_jobs(jobs, 2, StopSignals())}
    assert codes == {"good": 0, "bad": 1, "last": 0}
