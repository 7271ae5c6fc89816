"""Which of several failed ranks is to blame, and that ranks end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from meseta.cli import launch


def ranks_that(*programs: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", program]) for program in programs]


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
    monkeypatch.setattr(launch, "SETTLE_S", 2)
    ranks = ranks_that(*programs)
    try:
        assert launch._wait(ranks, launch.Calls()) == blamed
    finally:
        launch._stop(ranks)
    assert all(rank.returncode is not None for rank in ranks)


def test_a_rank_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.5)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    launch._stop([rank])
    assert rank.returncode == -signal.SIGKILL
    rank.stdout.close()


def test_a_rank_ends_with_its_launcher() -> None:
    program = "from meseta.cli.launch import follow_launcher; follow_launcher(); import time; time.sleep(60)"
    source = os.path.dirname(os.path.dirname(os.path.dirname(launch.__file__)))
    environment = {**os.environ, launch.FOLLOWS: "1", "PYTHONPATH": source}
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, env=environment)
    time.sleep(0.3)
    assert rank.poll() is None and rank.stdin is not None
    rank.stdin.close()
    assert rank.wait(10) == 1


def test_only_losses_of_peers_are_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42"
    assert not launch.is_loss_of_peer(RuntimeError(text))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.is_loss_of_peer(RuntimeError(text))
    assert not launch.is_loss_of_peer(RuntimeError("shape '[3]' is invalid for input of size 2"))
