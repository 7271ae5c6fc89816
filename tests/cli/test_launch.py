"""Tests of the choice of the failed rank that is reported, and of ranks that end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cli.processes import fact_of, stat_of
from forked import forking
from meseta.cli import launch
from meseta.cli.watch import RankWatch
from meseta.system.time_limits import TimeLimits


def ranks_that(*programs: str) -> list[BaseProcess]:
    """Return processes that run these Python programs."""
    arguments = [[sys.executable, "-c", program] for program in programs]
    ranks: list[BaseProcess] = [forking().Process(target=os.execv, args=(sys.executable, words)) for words in arguments]
    for rank in ranks:
        rank.start()
    return ranks


@pytest.mark.parametrize(
    ("programs", "blamed"),
    [
        (["exit(1)", "exit(1)"], 0),
        (["exit(75)", "exit(1)"], 1),
        (["exit(75)", "exit(75)"], 0),
        (["exit(1)", "import os; os.kill(os.getpid(), 9)"], 1),
        (["import os; os.abort()", "exit(75)", "import time; time.sleep(0.5); exit(1)"], 2),
        (["import time; time.sleep(60)", "exit(3)"], 1),
        (["exit(0)", "exit(0)", "exit(2)"], 2),
        (["exit(0)", "exit(0)"], None),
    ],
)
def test_the_rank_that_failed_for_a_reason_of_its_own(
    programs: list[str], blamed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PEER_EXIT_GRACE_S", 2)
    ranks = ranks_that(*programs)
    try:
        with RankWatch(len(ranks), TimeLimits()) as watch:
            assert launch._wait_for_ranks(ranks, launch.StopSignals(), watch) == blamed
    finally:
        launch._stop_ranks(ranks)
    assert all(rank.exitcode is not None for rank in ranks)


def test_a_rank_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN_GRACE_S", 0.5)
    deaf = tmp_path / "deaf"
    program = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    (rank,) = ranks_that(f"{program} pathlib.Path({str(deaf)!r}).touch(); time.sleep(60)")
    while not deaf.exists():
        time.sleep(0.01)
    launch._stop_ranks([rank])
    assert rank.exitcode == -signal.SIGKILL


SLEEPER = """
import os, sys, time, types
from meseta.cli import launch
say = lambda value: os.write(1, f"{value}\\n".encode())  # one write, as two processes print
sys.modules["meseta.cli.preload"] = types.ModuleType("preloaded")
launch.command_line = lambda: (say(sys.argv), time.sleep(60))
command = launch.start_command(["train", "a.yaml"], "meseta rank 0")
say(command.pid)
time.sleep(60)
"""


def test_a_command_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = {launcher.stdout.readline().strip() for _ in range(2)}
        argv = "['meseta', 'train', 'a.yaml']"
        (pid,) = lines - {argv}
        assert fact_of(int(pid), "comm") == "meseta rank 0\n"
        launcher.kill()
        deadline = time.monotonic() + 10
        while stat_of(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_only_losses_of_peers_are_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42"
    assert not launch.is_peer_loss(RuntimeError(text))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.is_peer_loss(RuntimeError(text))
    assert not launch.is_peer_loss(RuntimeError("shape '[3]' is invalid for input of size 2"))
