"""Benchmark targets in separate processes take turns, and one that fails does not stop the others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from peers.installed import IMPORT_PATH
from peers.ops_peers import FbgemmOperators

from meseta.measure.harness.interleaved import Timing, TimingOptions, memory_groups, run_interleaved
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.harness.worker_group import TargetSpec, TimedWindow, WorkerGroup
from meseta.measure.threads import CpuTime, read_cpu_time
from meseta.spec import MesetaError

FOLDER = str(Path(__file__).parent)
QUICK = TimingOptions(num_starts=1, num_rounds=2, window_s=0.02, max_background_load=100.0)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> TargetSpec:
    monkeypatch.syspath_prepend(FOLDER)
    from sleeper import Sleeper

    return TargetSpec(name="sleeper", target_class=Sleeper, arguments={"milliseconds": 2.0}, import_path=(FOLDER,))


def test_all_targets_are_timed_and_failures_are_named(monkeypatch: pytest.MonkeyPatch, sleeper: TargetSpec) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # output is not buffered
    slow = replace(sleeper, variant=("slow",), arguments={"milliseconds": 30.0}, num_ranks=2)
    broken = [
        replace(sleeper, variant=(how,), arguments={"milliseconds": 0.0, "fails": how})
        for how in ("start", "action", "exit")
    ]
    log: list[str] = []
    outcome = run_interleaved([sleeper, *broken, slow], QUICK, log.append)
    assert log == [f"start {member.title}" for member in (sleeper, *broken, slow)]
    times = [outcome.seconds(member, "nap", 1) for member in (sleeper, slow)]
    assert times[0] and times[1] and 0.002 < times[0] < times[1]
    assert len(outcome.timings["sleeper slow", "nap", 1].windows) == 2
    assert outcome.facts["sleeper slow"]["rank"] == "0"
    assert outcome.failures == {
        "sleeper start": "sleeper start: ValueError: cannot be built",
        "sleeper action": "sleeper action: RuntimeError: nap was cut short",
        "sleeper exit": "sleeper exit: its process ended: exit code 3; noise on standard output",
    }


def test_an_interpreter_that_is_not_there(sleeper: TargetSpec) -> None:
    with pytest.raises(MesetaError, match="sleeper: cannot start '/nowhere/python'"):
        WorkerGroup(replace(sleeper, python="/nowhere/python"))


def test_another_interpreter_needs_no_packages(tmp_path: Path) -> None:
    """Peers run without this package and its dependencies."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no installed packages
    python.chmod(0o755)
    target = TargetSpec(name="peer", target_class=BenchmarkTarget, arguments={}, python=str(python))
    with WorkerGroup(target) as running:
        assert running.facts == {}
    broken = replace(target, target_class=FbgemmOperators, import_path=IMPORT_PATH)
    with pytest.raises(MesetaError, match="No module named 'torch'"):
        WorkerGroup(broken)


def test_groups_fill_the_memory(sleeper: TargetSpec) -> None:
    members = [
        replace(sleeper, variant=(str(i),), memory_bytes=size) for i, size in enumerate((4.0, 3.0, 2.0, 9.0, 1.0))
    ]
    assert [[m.memory_bytes for m in group] for group in memory_groups(members, 7.0)] == [
        [4.0, 3.0],
        [2.0],
        [9.0],
        [1.0],
    ]
    assert list(memory_groups([], 7.0)) == []


def test_noisy_windows_do_not_count_if_there_are_others() -> None:
    quiet, loud = [TimedWindow(s, 0.0) for s in (1.0, 2.0, 9.0)], [TimedWindow(100.0, 0.9)] * 2
    timing = Timing((*quiet, *loud), max_background_load=0.15)
    assert timing.seconds == 2.0 and not timing.is_noisy
    noisy = Timing((*quiet[:1], *loud), max_background_load=0.15)
    assert noisy.seconds == 100.0 and noisy.is_noisy


def test_background_load_excludes_this_process() -> None:
    before, after = CpuTime(total_s=8.0, process_s=3.0), CpuTime(total_s=12.0, process_s=4.0)
    assert after.background_load_since(before, 2.0) == 1.5
    assert before.background_load_since(before, 2.0) == 0.0
    assert read_cpu_time([2**30]) == CpuTime(0.0, 0.0)  # a process that has ended
