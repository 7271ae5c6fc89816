"""Steps of a loop use fewer threads while other processes need the processors and fewer threads are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from meseta.measure import threads
from meseta.measure.threads import StepThreads, use_num_threads
from meseta.system.environment_variables import WAIT_POLICY

Steps = Callable[[int], list[int]]


@pytest.fixture
def contention(monkeypatch: pytest.MonkeyPatch) -> Iterator[threads.CpuContention]:
    """Simulate contention: three threads on three processors, two of which other processes need."""
    contention = threads.CpuContention(num_threads=3, num_processors=3)
    contention.update(2.0)
    monkeypatch.setattr(threads, "current_contention", lambda: contention)
    with use_num_threads(3):
        yield contention


class Machine:
    """Simulated machine whose clock advances by the time of a step, which depends on the number of threads."""

    def __init__(self, seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self._now_s, self._loop = seconds, 0.0, StepThreads()
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self._now_s)

    def steps(self, count: int) -> list[int]:
        """Run steps and return the number of threads of each."""
        numbers = []
        for _ in range(count):
            with self._loop:
                numbers.append(torch.get_num_threads())
                self._now_s += self.seconds[numbers[-1]]
        return numbers


def test_steps_use_the_faster_number_and_retry_the_other(
    contention: threads.CpuContention, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({3: 0.02, 1: 0.013}, monkeypatch)
    first = machine.steps(200)
    assert set(first) == {1, 3}, "both are tried"
    assert first[-100:].count(1) >= 90
    machine.seconds = {3: 0.1, 1: 0.15}
    assert machine.steps(2000)[-100:].count(3) >= 90, "the faster number may change"


def test_a_slow_first_step_does_not_decide(contention: threads.CpuContention, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({3: 10.0, 1: 10.0}, monkeypatch)
    machine.steps(2)  # one with each number
    machine.seconds = {3: 0.12, 1: 0.2}
    assert machine.steps(40)[-30:].count(3) >= 28
    machine.seconds = {3: 0.2, 1: 0.12}
    machine.steps(1000)
    assert machine.steps(100).count(1) >= 95


def test_without_contention_all_threads_are_used(
    contention: threads.CpuContention, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({3: 0.2, 1: 0.1}, monkeypatch)
    contention.is_contended = False
    assert machine.steps(10) == [3] * 10
    contention.is_contended = True
    assert machine.steps(20)[-1] == 1
    contention.is_contended = False
    assert machine.steps(3) == [3] * 3
    contention.is_contended = True
    assert machine.steps(20).count(1) >= 18, "measurements are kept"


def test_nothing_changes_without_a_contention_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in WAIT_POLICY.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    with use_num_threads(2), StepThreads():
        assert threads.current_contention() is None and torch.get_num_threads() == 2
    with threads.adaptive_wait_policy(2):
        contention = threads.current_contention()
        assert contention is None or contention.num_threads == 2  # None: the runtime is not GNU's
    assert threads.current_contention() is None


@pytest.mark.parametrize(
    ("others", "fitting"), [(0.0, 8), (0.25, 8), (1.0, 7), (1.25, 7), (1.3, 6), (7.2, 1), (8.0, 1), (12.0, 1)]
)
def test_the_number_of_threads_follows_the_idle_processors(others: float, fitting: int) -> None:
    contention = threads.CpuContention(num_threads=8, num_processors=8)
    assert contention.update(others) == (fitting < 8) and contention.num_usable_threads == fitting
    roomy, fixed = threads.CpuContention(4, 8), threads.CpuContention(8, 8, min_threads=8)
    assert roomy.update(others) == (fitting < 4) and roomy.num_usable_threads == min(fitting, 4)
    assert fixed.update(others) == (fitting < 8) and fixed.num_usable_threads == 8
