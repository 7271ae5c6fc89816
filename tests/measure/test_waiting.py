"""Threads sleep while others want the processors, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from meseta.machine.waiting import WAITING
from meseta.measure import waiting
from meseta.measure.quiet import ProcessorTime, processor_s
from source_tree import ROOT

# Two threads add up a little, then nothing happens for longer than a thread spins; the process's own seconds tell.
PROGRAM = """
import time
import torch
from meseta.measure import waiting
torch.set_num_threads(2)
x = torch.zeros(1 << 17)
def spent():
    before = time.process_time()
    for _ in range(40):
        x.add_(1)
        time.sleep(0.02)
    return time.process_time() - before
runtime = waiting._runtime()
spent()
spinning = spent()
spare = waiting.SpareTeam(runtime, 2)
sleeping = spent()
spare.end()
print(spinning, sleeping, spent())
"""


def test_no_thread_spins_beside_a_spare_team() -> None:
    variables = {**os.environ, **WAITING, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, timeout=120, check=True
    )
    spinning, sleeping, again = map(float, done.stdout.split())
    assert sleeping < 0.5 * spinning and sleeping < 0.5 * again


def test_crowded_at_once_and_calm_after_a_while() -> None:
    crowd = waiting.Crowd(num_threads=2, num_processors=2)
    assert [crowd.look(others) for others in (0.0, 0.2, 1.0)] == [False, False, True]
    calm = [crowd.look(0.1) for _ in range(waiting.NUM_CALM)]
    assert calm == [True] * (waiting.NUM_CALM - 1) + [False]
    assert not waiting.Crowd(num_threads=2, num_processors=4).look(2.0), "two processors are left to others"


def test_a_spare_team_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = threading.Event()
    clock = {"all": 0.0}

    def reading(pids: Sequence[int], processors: Sequence[int] | None = None) -> ProcessorTime:
        clock["all"] += busy.is_set() * 100.0
        return ProcessorTime(clock["all"], 0.0)

    class Spare:
        alive = 0

        def __init__(self, runtime: object, num_threads: int) -> None:
            Spare.alive += 1

        def end(self) -> None:
            Spare.alive -= 1

    def wait_for(count: int) -> None:
        end = time.monotonic() + 20
        while Spare.alive != count and time.monotonic() < end:
            time.sleep(0.005)
        assert Spare.alive == count

    for name, value in (("processor_s", reading), ("SpareTeam", Spare), ("PERIOD_S", 0.01), ("_runtime", object)):
        monkeypatch.setattr(waiting, name, value)
    for name, text in WAITING.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    cores = len(os.sched_getaffinity(0))
    with waiting.sleep_when_crowded(max(cores, 2)):
        busy.set()
        wait_for(1)
        busy.clear()
        wait_for(0)
        busy.set()
        wait_for(1)
    assert Spare.alive == 0
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    before = threading.active_count()
    with waiting.sleep_when_crowded(2):
        assert threading.active_count() == before, "the user has chosen"


def test_readings_of_some_processors() -> None:
    every = sorted(os.sched_getaffinity(0))
    some, whole = processor_s([os.getpid()], every[:1]), processor_s([os.getpid()])
    assert 0 < some.all <= whole.all and some.own == pytest.approx(whole.own, abs=1.0)
