"""Fixtures that run commands in this process, which saves the start of Python."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from meseta.cli.main import main
from meseta.telemetry.detail import CurrentDetail, Detail

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("train", config)` -> (exit code, standard output, standard error)."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(CurrentDetail, "level", Detail.NORMAL)  # Commands change it.

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meseta", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = left.value.code
        assert code is None or isinstance(code, int)
        return code or 0, captured.out, captured.err

    yield call
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def output_of(run: Run) -> Callable[..., str]:
    """`output_of("train", config)` -> standard output; the command must succeed."""

    def call(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def error_of(run: Run) -> Callable[..., str]:
    """`error_of("train", config)` -> the one line with which the command is refused."""

    def call(*arguments: object) -> str:
        code, _, err = run(*arguments)
        assert code == 1
        lines = err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], err
        return lines[-1]

    return call
