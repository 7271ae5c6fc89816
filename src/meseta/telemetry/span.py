"""Measured pieces of a step's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from meseta.spec.stages import StageName
from meseta.telemetry.rank_record import ThisProcess


class Span(NamedTuple):
    """One piece of measured time."""

    stage: StageName | Literal["step"]
    """'step': a whole one, from the moment when it was asked for."""
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


class CopySpan(NamedTuple):
    """A batch on its way to a device, beside what that computes."""

    step: int
    """Steps that were timed before the one in which it began."""
    num_bytes: int
    begin_s: float
    """On the clock of time.perf_counter()."""
    end_s: float


class DeviceClock:
    """Of a stream of a device, whose work is only begun by the lines of a stage: a mark is an event in the stream, and
    is read when the device has passed it anyway. Nobody waits in a step, but at the very first mark.

    A stage is as long as its stream took between its two events, so that what a busy device hides takes no time, and a
    device that stands idle while the host does something counts as that.
    """

    def __init__(
        self, new_event: Callable[[], Any], current_stream: Callable[[], Any], wait: Callable[[], object]
    ) -> None:
        """`new_event` makes an event as torch.cuda.Event(enable_timing=True) does; `wait` waits for the device. The
        current stream is asked for once in a step: to ask takes longer than to mark."""
        self._new_event, self._current_stream, self.wait = new_event, current_stream, wait
        self._stream: Any = None
        self._last: Any = None
        self._last_s = 0.0
        self._aligned: tuple[Any, float] = None, 0.0
        """The event by which it was set, and when that was."""

    def begin_step(self) -> None:
        """Mark the stream that is the current one now, until the next step."""
        self._stream = self._current_stream()

    def mark(self, stream: Any = None) -> Any:
        """An event in a stream, by default that of the step."""
        if self._last is None:
            self.align()
        event = self._new_event()
        event.record(self._stream if stream is None else stream)
        return event

    def align(self) -> None:
        """Set it by the host's clock, when all that was marked is told: an idle stream passes an event at once."""
        self.wait()
        self.begin_step()
        self._last = self._new_event()
        self._last.record(self._stream)
        self._last_s = time.perf_counter()
        self._aligned = self._last, self._last_s

    def is_known(self, mark: Any) -> bool:
        """Whether the device has passed it."""
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        """By the event that was asked for before: differences between events are in 32 bits, and few seconds fit."""
        self._last_s += 1e-3 * self._last.elapsed_time(mark)
        self._last = mark
        return self._last_s

    def seconds_beside(self, mark: Any) -> float:
        """Of an event in any stream, in any order, by the event that the clock was set by last, which is not long
        ago."""
        event, at_s = self._aligned
        return at_s + 1e-3 * float(event.elapsed_time(mark))


class _Timed:
    """A stage, or a step, whose moments are marked: in seconds, or by events of a device."""

    __slots__ = ("begin", "end", "inside", "stage")

    def __init__(self, stage: StageName | Literal["step"], begin: Any, end: Any = None) -> None:
        self.stage, self.begin, self.end = stage, begin, end
        self.inside: list[_Timed] = []


class StageTimes:
    """Seconds by stage, added up over spans since the last `take`. The time of a stage inside another is not the
    other's."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        """`clock` is that of the device that computes; None: the host does, where a stage ends with its last line."""
        self._recorded: list[Span] | None = None
        self._copies: list[tuple[int, int, Any, Any]] = []
        """Those since `record`: the fields of a CopySpan, with marks in place of seconds."""
        self._clock = clock
        self._ended: deque[list[_Timed]] = deque()
        """What is not added up yet: of each step what lies in no other stage, in the order of their ends, then it."""
        self._inside: list[_Timed] = []
        """Where a stage goes when it has ended: of the stage, or the step, under way."""
        self._begin: Any = None
        self._seconds: dict[str, float] = {}
        self._life: dict[str, float] = {}
        self._num_steps = self._num_taken = 0
        self._of_step: list[Span] = []
        """Stages, in no other, since the step that was added up last."""

    @contextmanager
    def stage(self, name: StageName) -> Iterator[None]:
        """Time a stage; one that raises counts for nothing, but for what has ended in it."""
        timed, record = _Timed(name, self._mark()), ThisProcess.record
        outer, self._inside = self._inside, timed.inside
        if record is not None:
            record.enter(name, self._num_steps + len(self._ended))
        try:
            yield
        except BaseException:
            outer.extend(timed.inside)
            raise
        finally:
            self._inside = outer
            if record is not None:
                record.leave()
        timed.end = self._mark()
        outer.append(timed)

    @contextmanager
    def copying(self, num_bytes: int, stream: Any) -> Iterator[None]:
        """Time a copy in a stream beside that of the stages; kept since `record`."""
        begin = None if self._recorded is None else self._mark(stream)
        yield
        if begin is not None:
            self._copies.append((self._num_steps + len(self._ended), num_bytes, begin, self._mark(stream)))

    def begin_step(self) -> None:
        """A step is asked for; what was timed since the end of the one before lies between them."""
        if self._clock is not None:
            self._clock.begin_step()
        self._begin = self._mark()

    def end_step(self) -> None:
        """One more step is behind us."""
        end = self._mark()
        self._inside.append(_Timed("step", end if self._begin is None else self._begin, end))
        self._ended.append(self._inside)
        self._inside, self._begin = [], None
        self._add_up()

    def take(self) -> dict[str, float]:
        """Mean seconds per step of each stage since the last call; of a device, over the steps that it has ended. To be
        called between steps."""
        self._add_up_rest()
        num_steps, self._num_taken = self._num_steps - self._num_taken, self._num_steps
        seconds, self._seconds = self._seconds, {}
        for name, spent_s in seconds.items():
            self._life[name] = self._life.get(name, 0.0) + spent_s
        return {name: spent_s / max(num_steps, 1) for name, spent_s in seconds.items()}

    def over_life(self) -> dict[str, float]:
        """Mean seconds per step of each stage, over all that was taken."""
        return {name: spent_s / max(self._num_taken, 1) for name, spent_s in self._life.items()}

    def record(self) -> None:
        """Keep spans from now on, until `recorded`. Both are to be called between steps, and wait for a device."""
        self._add_up_all()
        if self._clock is not None:
            self._clock.align()
        self._recorded = []

    def recorded(self) -> list[Span]:
        """Those since `record`, stages and steps, what lies in another before it."""
        self._add_up_all()
        spans, self._recorded = self._recorded or [], None
        return spans

    def recorded_copies(self) -> list[CopySpan]:
        """The copies of the same time; to be called behind `recorded`."""
        copies, self._copies = self._copies, []
        seconds = self._seconds_of if self._clock is None else self._clock.seconds_beside
        return [CopySpan(step, size, seconds(begin), seconds(end)) for step, size, begin, end in copies]

    def _mark(self, stream: Any = None) -> Any:
        return time.perf_counter() if self._clock is None else self._clock.mark(stream)

    def _is_known(self, mark: Any) -> bool:
        return self._clock is None or self._clock.is_known(mark)

    def _seconds_of(self, mark: Any) -> float:
        return mark if self._clock is None else self._clock.seconds(mark)

    def _add_up_all(self) -> None:
        if self._clock is not None:
            self._clock.wait()
        self._add_up_rest()

    def _add_up(self) -> None:
        """What is known of steps that have ended."""
        while self._ended and self._is_known(self._ended[0][-1].end):
            for timed in self._ended.popleft():
                if timed.stage == "step":
                    self._end(timed)
                else:
                    self._of_step.append(self._add(timed))

    def _add_up_rest(self) -> None:
        """The same, and what was timed since the last one, where nothing is under way."""
        self._add_up()
        if not self._ended and self._inside and self._is_known(self._inside[-1].end):
            self._of_step += map(self._add, self._inside)
            self._inside = []

    def _add(self, timed: _Timed) -> Span:
        """Count a stage, and before it those inside."""
        begin_s, inside_s = self._seconds_of(timed.begin), 0.0
        for inner in timed.inside:
            span = self._add(inner)
            inside_s += span.end_s - span.begin_s
        span = Span(timed.stage, self._num_steps, begin_s, self._seconds_of(timed.end), inside_s)
        self._seconds[span.stage] = self._seconds.get(span.stage, 0.0) + span.own_s
        if self._recorded is not None:
            self._recorded.append(span)
        return span

    def _end(self, timed: _Timed) -> None:
        """Count a step."""
        begin_s, end_s = self._seconds_of(timed.begin), self._seconds_of(timed.end)
        inside_s = sum(span.end_s - span.begin_s for span in self._of_step if span.begin_s >= begin_s)
        if self._recorded is not None:
            self._recorded.append(Span("step", self._num_steps, begin_s, end_s, inside_s))
        self._of_step.clear()
        self._num_steps += 1
