"""Tests of the autoscaler in a simulation: the target reaches the optimum of a sweep quickly and stays stable."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.service.test_lease_table import Clock
from meseta.data.service.server.autoscaler import ReaderAutoscaler, ReaderLoad
from meseta.data.service.server.rates import RATE_WINDOW_S, CounterHistory
from meseta.spec import MesetaError
from sampling import fewer_examples

TICK_S = 0.25
START_S = 2.0
"""Seconds until a started reader serves windows."""
MOST = 8


@dataclass
class SimulatedReader:
    joins_s: float
    queue: list[list[float]] = field(default_factory=list)
    """[number, seconds left] of its windows, in turn."""
    busy_s: float = 0.0


@dataclass
class Simulation:
    """Training that takes windows in order, each in `eats_s` seconds, and readers that take `makes_s` for one; readers
    are given windows in turn, as many ahead as there are readers, as `ServedRows` and `LeaseTable` do."""

    makes_s: Callable[[float], float]
    eats_s: Callable[[float], float]
    target: int
    scale: ReaderAutoscaler | None = None
    clock: Clock = field(default_factory=Clock)
    seed: int = 0
    noise: float = 0.2

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.readers = [SimulatedReader(0.0) for _ in range(self.target)]
        self.next = self.at = 0
        self.ready: set[int] = set()
        self.left_s, self.waited_s = 0.0, 0.0
        self.history: list[tuple[float, int, float]] = []
        """(time, target, seconds waited so far)."""
        self.trainer, self.growth = CounterHistory(), CounterHistory()

    def run(self, until_s: float) -> Simulation:
        while self.clock.now_s < until_s:
            self.tick()
        return self

    def tick(self) -> None:
        now_s = self.clock.now_s
        there = [reader for reader in self.readers if reader.joins_s <= now_s]
        while there and self.next <= self.at + min(len(there), MOST):
            seconds = self.makes_s(now_s) * self.draw.uniform(1 - self.noise, 1 + self.noise)
            there[self.next % len(there)].queue.append([self.next, seconds])
            self.next += 1
        for reader in self.readers:
            self.work(reader)
        self.eat(now_s)
        self.clock.now_s += TICK_S
        if self.scale is not None and now_s % 1.0 < TICK_S:
            self.look(there)
        self.history.append((self.clock.now_s, self.target, self.waited_s))

    def work(self, reader: SimulatedReader) -> None:
        left_s = TICK_S
        while reader.queue and left_s > 0:
            did_s = min(left_s, reader.queue[0][1])
            reader.queue[0][1] -= did_s
            reader.busy_s += did_s
            left_s -= did_s
            if reader.queue[0][1] <= 0:
                self.ready.add(int(reader.queue.pop(0)[0]))

    def eat(self, now_s: float) -> None:
        left_s = TICK_S
        while left_s > 0:
            if self.left_s <= 0:
                if self.at not in self.ready:
                    self.waited_s += left_s if self.at else 0.0  # that of the first rows is none
                    return
                self.ready.discard(self.at)
                self.at += 1
                self.left_s = self.eats_s(now_s)
            did_s = min(left_s, self.left_s)
            self.left_s -= did_s
            left_s -= did_s

    def look(self, there: list[SimulatedReader]) -> None:
        """Scale like the dispatcher, with counters of ranks every three seconds and of readers every second."""
        assert self.scale is not None
        now_s = self.clock.now_s
        if now_s % 3.0 < 1.0:
            self.trainer.update(now_s, self.waited_s, now_s)
        self.growth.update(now_s, sum(reader.busy_s for reader in self.readers))
        waited_s, passed_s = self.trainer.recent_increase() or (0.0, 0.0)
        load = ReaderLoad(
            num_readers=len(there),
            waiting_shares=[waited_s / passed_s] if passed_s >= RATE_WINDOW_S else [],
            busy_readers=self.growth.rates()[0],
            window_s=self.makes_s(now_s),
        )
        self.target = self.scale.update(load)
        while len(self.readers) < self.target:
            self.readers.append(SimulatedReader(now_s + START_S))
        while len(self.readers) > self.target:  # what one that leaves was asked for goes to others here
            leaving = self.readers.pop()
            self.readers[0].queue = sorted(self.readers[0].queue + leaving.queue)

    def waiting(self, since_s: float, until_s: float) -> float:
        inside = [waited for now_s, _, waited in self.history if since_s <= now_s <= until_s]
        return (inside[-1] - inside[0]) / (until_s - since_s)

    def changes(self, since_s: float, until_s: float) -> int:
        targets = [number for now_s, number, _ in self.history if since_s <= now_s <= until_s]
        return sum(a != b for a, b in pairwise(targets))


def constant(value: float) -> Callable[[float], float]:
    return lambda _: value


@cache
def needed(makes_s: float, eats_s: float, seed: int) -> int:
    """Return the smallest number of readers with which training waits for less than 2 % of the time."""
    for number in range(1, MOST + 1):
        run = Simulation(constant(makes_s), constant(eats_s), number, seed=seed).run(400.0)
        if run.waiting(100.0, 400.0) < 0.02:
            return number
    return MOST


def scaled(makes_s: Callable[[float], float], eats_s: Callable[[float], float], first: int, seed: int) -> Simulation:
    clock = Clock()
    scale = ReaderAutoscaler(1, MOST, clock)
    return Simulation(makes_s, eats_s, first, scale, clock, seed)


@fewer_examples(3)
@given(ratio=st.floats(0.1, 6.5), eats_s=st.floats(0.3, 1.5), first=st.integers(1, 5), seed=st.integers(0, 99))
def test_it_comes_to_what_a_sweep_finds_and_stays(ratio: float, eats_s: float, first: int, seed: int) -> None:
    run = scaled(constant(ratio * eats_s), constant(eats_s), first, seed).run(900.0)
    expected = needed(ratio * eats_s, eats_s, seed)
    assert run.target <= expected + 1
    assert run.target >= expected or run.waiting(600.0, 900.0) < 0.02
    assert run.changes(300.0, 600.0) <= 2 and run.changes(600.0, 900.0) <= 2


@fewer_examples(3)
@given(before=st.floats(2.2, 4.8), faster=st.floats(2.5, 4.0), seed=st.integers(0, 99))
@example(before=2.9765625, faster=2.5, seed=77)  # one more is asked for shortly before there is less to do
def test_it_follows_up_within_a_minute_and_down_within_two(before: float, faster: float, seed: int) -> None:
    """Windows take several times as long for a while."""
    change_s, back_s = 400.0, 800.0

    def makes_s(now_s: float) -> float:
        return before if change_s <= now_s < back_s else before / faster

    run = scaled(makes_s, constant(1.0), 1, seed).run(1200.0)
    at = {round(now_s): target for now_s, target, _ in run.history}
    assert at[460] > at[400] and run.waiting(520.0, 800.0) < 0.05
    assert at[920] < at[800]
    assert run.changes(500.0, 800.0) <= 2 and run.changes(900.0, 1200.0) <= 2
    assert run.target <= needed(before / faster, 1.0, seed) + 1


def seen(scale: ReaderAutoscaler, clock: Clock, seconds: float, num_readers: int, *shares: float, busy: float) -> int:
    """Return the target after `seconds` of constant load."""
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        load = ReaderLoad(num_readers=num_readers, waiting_shares=shares, busy_readers=busy, window_s=1.0)
        target = scale.update(load)
        clock.now_s += 1.0
    return target


def test_readers_that_bring_nothing_go_again() -> None:
    """All readers share one disk: more readers are tried every five minutes."""
    clock = Clock()
    scale = ReaderAutoscaler(1, 99, clock)
    assert seen(scale, clock, 40, 2, 0.5, busy=2.0) == 5
    assert seen(scale, clock, 40, 5, 0.45, busy=5.0) == 10, "once may be by chance"
    assert seen(scale, clock, 40, 10, 0.45, busy=9.0) == 2
    assert seen(scale, clock, 240, 2, 0.5, busy=2.0) == 2
    assert seen(scale, clock, 100, 2, 0.5, busy=2.0) == 5
    assert seen(scale, clock, 40, 5, 0.3, busy=5.0) == 8, "these brought something"
    few = ReaderAutoscaler(1, 3, clock)
    assert seen(few, clock, 40, 2, 0.5, busy=2.0) == 3
    assert seen(few, clock, 40, 3, 0.5, busy=3.0) == 2, "there are no more to try"


def test_trainings_share_the_readers() -> None:
    clock = Clock()
    assert seen(ReaderAutoscaler(1, 99, clock), clock, 40, 10, 0.6, 0.0, busy=10.0) == 15


def test_readers_that_were_there_before_are_kept_until_it_is_known_what_they_do() -> None:
    """A new dispatcher replaces one that died."""
    clock = Clock()
    scale = ReaderAutoscaler(1, 6, clock)
    assert scale.target_readers == 1
    assert seen(scale, clock, 5, 3, busy=0.0) == 3
    assert seen(scale, clock, 5, 9, busy=0.0) == 6
    assert seen(scale, clock, 200, 9, busy=0.0) == 1, "nobody reads"


def test_training_that_ends_asks_for_none() -> None:
    clock = Clock()
    scale = ReaderAutoscaler(1, 9, clock)
    assert seen(scale, clock, 21, 2, busy=0.1) == 2
    assert seen(scale, clock, 1, 2, 0.9, busy=2.0) == 2
    assert seen(scale, clock, 20, 2, busy=0.1) == 2
    assert seen(scale, clock, 100, 2, busy=0.1) == 1


def test_no_reader_at_all_decides_nothing() -> None:
    clock = Clock()
    scale = ReaderAutoscaler(3, 5, clock)
    assert seen(scale, clock, 500, 0, 1.0, busy=0.0) == 3


def test_readers_that_do_not_come_are_not_asked_for_again_and_again() -> None:
    clock = Clock()
    scale = ReaderAutoscaler(1, 99, clock)
    assert seen(scale, clock, 40, 2, 0.5, busy=2.0) == 5
    assert seen(scale, clock, 900, 2, 0.5, busy=2.0) == 5


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3), (-1, -1)])
def test_bounds(least: int, most: int) -> None:
    with pytest.raises(MesetaError, match="--min must be at least 1 and at most --max"):
        ReaderAutoscaler(least, most)
