"""OpenMP threads sleep while other processes need the processors, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from meseta.measure import threads
from meseta.measure.threads import CpuTime, read_cpu_time
from meseta.system.environment_variables import WAIT_POLICY
from source_tree import ROOT

# Two threads add up a little, then nothing runs for longer than a thread spins. The CPU time shows whether it spins.
PROGRAM = """
import time
import torch
from meseta.measure import threads
torch.set_num_threads(2)
x = torch.zeros(1 << 17)
def spent():
    before = time.process_time()
    for _ in range(40):
        x.add_(1)
        time.sleep(0.02)
    return time.process_time() - before
runtime = threads._find_libgomp()
spent()
spinning = spent()
spare = threads.OversubscriptionThreads(runtime, 2)
sleeping = spent()
spare.stop()
print(spinning, sleeping, spent())
"""


def test_no_thread_spins_next_to_a_spare_team() -> None:
    variables = {**os.environ, **WAIT_POLICY, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, timeout=120, check=True
    )
    spinning, sleeping, again = map(float, done.stdout.split())
    assert sleeping < 0.5 * spinning and sleeping < 0.5 * again


def test_contention_begins_immediately_and_ends_after_a_while() -> None:
    contention = threads.CpuContention(num_threads=2, num_processors=2)
    assert [contention.update(others) for others in (0.0, 0.2, 1.0)] == [False, False, True]
    calm = [contention.update(0.1) for _ in range(threads.NUM_CALM_POLLS)]
    assert calm == [True] * (threads.NUM_CALM_POLLS - 1) + [False]
    assert not threads.CpuContention(num_threads=2, num_processors=4).update(2.0), "two processors are left to others"


def test_a_spare_team_starts_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = threading.Event()
    clock = {"all": 0.0}

    def reading(pids: Sequence[int], processors: Sequence[int] | None = None) -> CpuTime:
        clock["all"] += busy.is_set() * 100.0
        return CpuTime(clock["all"], 0.0)

    class Spare:
        alive = 0

        def __init__(self, runtime: object, num_threads: int) -> None:
            Spare.alive += 1

        def stop(self) -> None:
            Spare.alive -= 1

    def wait_for(count: int) -> None:
        end = time.monotonic() + 20
        while Spare.alive != count and time.monotonic() < end:
            time.sleep(0.005)
        assert Spare.alive == count

    for name, value in (
        ("read_cpu_time", reading),
        ("OversubscriptionThreads", Spare),
        ("POLL_INTERVAL_S", 0.01),
        ("_find_libgomp", object),
    ):
        monkeypatch.setattr(threads, name, value)
    for name, text in WAIT_POLICY.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    cores = len(os.sched_getaffinity(0))
    with threads.adaptive_wait_policy(max(cores, 2)):
        busy.set()
        wait_for(1)
        busy.clear()
        wait_for(0)
        busy.set()
        wait_for(1)
    assert Spare.alive == 0
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    before = threading.active_count()
    with threads.adaptive_wait_policy(2):
        assert threading.active_count() == before, "the user has chosen"


def test_readings_of_some_processors() -> None:
    every = sorted(os.sched_getaffinity(0))
    some, whole = read_cpu_time([os.getpid()], every[:1]), read_cpu_time([os.getpid()])
    assert 0 < some.total_s <= whole.total_s and some.process_s == pytest.approx(whole.process_s, abs=1.0)
