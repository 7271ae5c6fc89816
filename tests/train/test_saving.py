"""When a run saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.train.interruption import Interruption
from meseta.train.saving import Saver
from small_run import settings, train


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())


def test_every_so_many_minutes(tiny: Path, tmp_path: Path) -> None:
    """So few that every step is due; and so many that none is."""
    for name, minutes, expected in (("few", 1e-9, [1, 2, 3, 4, 5]), ("many", 60, [5])):
        changes = {"train__max_steps": 5, "checkpoint__every_minutes": minutes, "checkpoint__keep_last": 9}
        train(settings(tiny, tmp_path / name, **changes))
        assert saved_steps(tmp_path / name) == expected


def test_steps_minutes_signals_and_the_best(tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps=4, keep_best=True)
    saver = Saver(config, tmp_path, World.single())
    assert [step for step in range(1, 10) if saver.is_due(step, is_best=step == 7)] == [4, 7, 8]
    assert saver.votes() == (0, 0)
    for votes, due, stopping in (((0.0, 2.0), True, False), ((1.0, 0.0), True, True), ((0.0, 0.0), False, False)):
        saver.hear(votes)
        assert (saver.is_due(3, is_best=False), saver.stopping) == (due, stopping)


def test_the_clock_of_rank_0_counts(tmp_path: Path) -> None:
    config = CheckpointConfig(every_minutes=1e-9)
    worlds = [World(rank=rank, size=2, device=World.single().device) for rank in (0, 1)]
    assert [Saver(config, tmp_path, world).votes() for world in worlds] == [(0, 1), (0, 0)]


def test_a_signal_is_noted_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        for _ in range(2):  # the second one comes so soon that it is the same call
            os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while interruption.number is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert interruption.number == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_ignored_signals_stay_ignored_and_other_threads_set_no_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    found = []

    def elsewhere() -> None:
        with Interruption():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
