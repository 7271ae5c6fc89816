"""The command in the process of the test. Its child processes start from the server of all tests."""

from __future__ import annotations

import multiprocessing.forkserver
import signal
from collections.abc import Callable, Iterator

import pytest

from forked import forking
from tools.quality.__main__ import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("suite.yaml", "--out", "out")` -> (exit code, standard output, standard error)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    forking()
    multiprocessing.forkserver.ensure_running()

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
