"""Measured pieces of a step's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from meseta.spec.stages import StageName
from meseta.telemetry.rank_record import Own


class Span(NamedTuple):
    """One piece of measured time."""

    stage: StageName
    step: int
    """Steps that were timed before it."""
    begin_s: float
    """On the clock of time.perf_counter()."""
    end_s: float
    inside_s: float
    """Of its seconds, those of the spans inside it."""

    @property
    def own_s(self) -> float:
        """Seconds that no span inside it has."""
        return self.end_s - self.begin_s - self.inside_s


class StageTimes:
    """Seconds by stage, added up over spans since the last `take`. The time of a stage inside another is not the
    other's."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        """`wait` waits for what was begun on a device: a stage ends with it, so stages do not hide in each other."""
        self.spans: list[Span] = []
        """Of the step under way, in the order of their ends."""
        self._wait = wait
        self._seconds: dict[str, float] = {}
        self._life: dict[str, float] = {}
        self._num_steps = self._num_taken = 0
        self._inside: list[float] = []

    @contextmanager
    def stage(self, name: StageName) -> Iterator[None]:
        """Time a stage; one that raises counts for nothing."""
        begin_s, record = time.perf_counter(), Own.record
        self._inside.append(0.0)
        if record is not None:
            record.enter(name, self._num_steps)
        try:
            yield
        finally:
            inside_s = self._inside.pop()
            if record is not None:
                record.leave()
        self._wait()
        end_s = time.perf_counter()
        self.spans.append(Span(name, self._num_steps, begin_s, end_s, inside_s))
        if self._inside:
            self._inside[-1] += end_s - begin_s

    def end_step(self) -> None:
        """One more step is behind us."""
        self._add_up()
        self._num_steps += 1

    def take(self) -> dict[str, float]:
        """Mean seconds per step of each stage since the last call."""
        self._add_up()
        num_steps, self._num_taken = self._num_steps - self._num_taken, self._num_steps
        seconds, self._seconds = self._seconds, {}
        for name, spent_s in seconds.items():
            self._life[name] = self._life.get(name, 0.0) + spent_s
        return {name: spent_s / max(num_steps, 1) for name, spent_s in seconds.items()}

    def over_life(self) -> dict[str, float]:
        """Mean seconds per step of each stage, over all that was taken."""
        return {name: spent_s / max(self._num_taken, 1) for name, spent_s in self._life.items()}

    def _add_up(self) -> None:
        for span in self.spans:
            self._seconds[span.stage] = self._seconds.get(span.stage, 0.0) + span.own_s
        self.spans.clear()
