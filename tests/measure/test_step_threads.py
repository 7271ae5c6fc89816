"""Steps of a loop go on fewer threads while others want the processors and that is faster, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from meseta.measure import threads
from meseta.measure.threads import StepThreads, use_num_threads
from meseta.system.wait_policy import WAIT_POLICY

Steps = Callable[[int], list[int]]


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[threads.CpuContention]:
    """Seen by loops: three threads on three processors, two of which others want."""
    crowd = threads.CpuContention(num_threads=3, num_processors=3)
    crowd.update(2.0)
    monkeypatch.setattr(threads, "current_contention", lambda: crowd)
    with use_num_threads(3):
        yield crowd


class Machine:
    """Its clock goes on by what a step takes on a number of threads."""

    def __init__(self, seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self._now_s, self._loop = seconds, 0.0, StepThreads()
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self._now_s)

    def steps(self, count: int) -> list[int]:
        """The threads of each."""
        numbers = []
        for _ in range(count):
            with self._loop:
                numbers.append(torch.get_num_threads())
                self._now_s += self.seconds[numbers[-1]]
        return numbers


def test_steps_take_the_faster_way_and_try_the_other(
    crowd: threads.CpuContention, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({3: 0.02, 1: 0.013}, monkeypatch)
    first = machine.steps(200)
    assert set(first) == {1, 3}, "both are tried"
    assert first[-100:].count(1) >= 90
    machine.seconds = {3: 0.1, 1: 0.15}
    assert machine.steps(2000)[-100:].count(3) >= 90, "what is faster may change"


def test_a_slow_first_step_does_not_decide(crowd: threads.CpuContention, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({3: 10.0, 1: 10.0}, monkeypatch)
    machine.steps(2)  # once on each
    machine.seconds = {3: 0.12, 1: 0.2}
    assert machine.steps(40)[-30:].count(3) >= 28
    machine.seconds = {3: 0.2, 1: 0.12}
    machine.steps(1000)
    assert machine.steps(100).count(1) >= 95


def test_a_calm_machine_has_all_threads(crowd: threads.CpuContention, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({3: 0.2, 1: 0.1}, monkeypatch)
    crowd.is_contended = False
    assert machine.steps(10) == [3] * 10
    crowd.is_contended = True
    assert machine.steps(20)[-1] == 1
    crowd.is_contended = False
    assert machine.steps(3) == [3] * 3
    crowd.is_contended = True
    assert machine.steps(20).count(1) >= 18, "what was measured is kept"


def test_nothing_is_changed_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in WAIT_POLICY.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    with use_num_threads(2), StepThreads():
        assert threads.current_contention() is None and torch.get_num_threads() == 2
    with threads.adaptive_wait_policy(2):
        crowd = threads.current_contention()
        assert crowd is None or crowd.num_threads == 2  # None: not GNU's runtime
    assert threads.current_contention() is None


@pytest.mark.parametrize(
    ("others", "fitting"), [(0.0, 8), (0.25, 8), (1.0, 7), (1.25, 7), (1.3, 6), (7.2, 1), (8.0, 1), (12.0, 1)]
)
def test_as_many_threads_fit_as_others_leave_processors(others: float, fitting: int) -> None:
    crowd = threads.CpuContention(num_threads=8, num_processors=8)
    assert crowd.update(others) == (fitting < 8) and crowd.num_usable_threads == fitting
    roomy, fixed = threads.CpuContention(4, 8), threads.CpuContention(8, 8, min_threads=8)
    assert roomy.update(others) == (fitting < 4) and roomy.num_usable_threads == min(fitting, 4)
    assert fixed.update(others) == (fitting < 8) and fixed.num_usable_threads == 8
