"""Measured pieces of a step's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from meseta.spec.stages import StageName
from meseta.telemetry.rank_record import CurrentRankRecord


class Span(NamedTuple):
    """One piece of measured time."""

    stage: StageName | Literal["step"]
    """'step': a whole one, from the moment when it was asked for."""
    step: int
    """Steps that were timed before it."""
    begin_s: float
    """On the clock of time.perf_counter()."""
    end_s: float
    nested_s: float
    """Of its seconds, those of the spans inside it."""

    @property
    def self_s(self) -> float:
        """Seconds that no span inside it has."""
        return self.end_s - self.begin_s - self.nested_s


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
        self._reference: tuple[Any, float] = None, 0.0
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
        self._reference = self._last, self._last_s

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has passed it."""
        return bool(mark.query())

    def to_seconds(self, mark: Any) -> float:
        """By the event that was asked for before: differences between events are in 32 bits, and few seconds fit."""
        self._last_s += 1e-3 * self._last.elapsed_time(mark)
        self._last = mark
        return self._last_s

    def to_seconds_any_stream(self, mark: Any) -> float:
        """Of an event in any stream, in any order, by the event that the clock was set by last, which is not long
        ago."""
        event, at_s = self._reference
        return at_s + 1e-3 * float(event.elapsed_time(mark))


class _MarkedSpan:
    """A stage, or a step, whose moments are marked: in seconds, or by events of a device."""

    __slots__ = ("begin", "end", "nested", "stage")

    def __init__(self, stage: StageName | Literal["step"], begin: Any, end: Any = None) -> None:
        self.stage, self.begin, self.end = stage, begin, end
        self.nested: list[_MarkedSpan] = []


class StageTimes:
    """Seconds by stage, added up over spans since the last `take`. The time of a stage inside another is not the
    other's."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        """`clock` is that of the device that computes; None: the host does, where a stage ends with its last line."""
        self._recording: list[Span] | None = None
        self._copies: list[tuple[int, int, Any, Any]] = []
        """Those since `record`: the fields of a CopySpan, with marks in place of seconds."""
        self._clock = clock
        self._pending_steps: deque[list[_MarkedSpan]] = deque()
        """What is not added up yet: of each step what lies in no other stage, in the order of their ends, then it."""
        self._open_spans: list[_MarkedSpan] = []
        """Where a stage goes when it has ended: of the stage, or the step, under way."""
        self._step_begin: Any = None
        self._seconds: dict[str, float] = {}
        self._lifetime_seconds: dict[str, float] = {}
        self._num_steps = self._num_reported_steps = 0
        self._step_spans: list[Span] = []
        """Stages, in no other, since the step that was added up last."""

    @contextmanager
    def stage(self, name: StageName) -> Iterator[None]:
        """Time a stage; one that raises counts for nothing, but for what has ended in it."""
        timed, record = _MarkedSpan(name, self._mark()), CurrentRankRecord.record
        outer, self._open_spans = self._open_spans, timed.nested
        if record is not None:
            record.enter_stage(name, self._num_steps + len(self._pending_steps))
        try:
            yield
        except BaseException:
            outer.extend(timed.nested)
            raise
        finally:
            self._open_spans = outer
            if record is not None:
                record.leave_stage()
        timed.end = self._mark()
        outer.append(timed)

    @contextmanager
    def time_copy(self, num_bytes: int, stream: Any) -> Iterator[None]:
        """Time a copy in a stream beside that of the stages; kept since `record`."""
        begin = None if self._recording is None else self._mark(stream)
        yield
        if begin is not None:
            self._copies.append((self._num_steps + len(self._pending_steps), num_bytes, begin, self._mark(stream)))

    def begin_step(self) -> None:
        """A step is asked for; what was timed since the end of the one before lies between them."""
        if self._clock is not None:
            self._clock.begin_step()
        self._step_begin = self._mark()

    def end_step(self) -> None:
        """One more step is behind us."""
        end = self._mark()
        self._open_spans.append(_MarkedSpan("step", end if self._step_begin is None else self._step_begin, end))
        self._pending_steps.append(self._open_spans)
        self._open_spans, self._step_begin = [], None
        self._accumulate_ended()

    def pop_means(self) -> dict[str, float]:
        """Mean seconds per step of each stage since the last call; of a device, over the steps that it has ended. To be
        called between steps."""
        self._accumulate_rest()
        num_steps, self._num_reported_steps = self._num_steps - self._num_reported_steps, self._num_steps
        seconds, self._seconds = self._seconds, {}
        for name, spent_s in seconds.items():
            self._lifetime_seconds[name] = self._lifetime_seconds.get(name, 0.0) + spent_s
        return {name: spent_s / max(num_steps, 1) for name, spent_s in seconds.items()}

    def lifetime_means(self) -> dict[str, float]:
        """Mean seconds per step of each stage, over all that was taken."""
        return {name: spent_s / max(self._num_reported_steps, 1) for name, spent_s in self._lifetime_seconds.items()}

    def start_recording(self) -> None:
        """Keep spans from now on, until `recorded`. Both are to be called between steps, and wait for a device."""
        self._accumulate_all()
        if self._clock is not None:
            self._clock.align()
        self._recording = []

    def stop_recording(self) -> list[Span]:
        """Those since `record`, stages and steps, what lies in another before it."""
        self._accumulate_all()
        spans, self._recording = self._recording or [], None
        return spans

    def pop_recorded_copies(self) -> list[CopySpan]:
        """The copies of the same time; to be called behind `recorded`."""
        copies, self._copies = self._copies, []
        seconds = self._to_seconds if self._clock is None else self._clock.to_seconds_any_stream
        return [CopySpan(step, size, seconds(begin), seconds(end)) for step, size, begin, end in copies]

    def _mark(self, stream: Any = None) -> Any:
        return time.perf_counter() if self._clock is None else self._clock.mark(stream)

    def _has_passed(self, mark: Any) -> bool:
        return self._clock is None or self._clock.has_passed(mark)

    def _to_seconds(self, mark: Any) -> float:
        return mark if self._clock is None else self._clock.to_seconds(mark)

    def _accumulate_all(self) -> None:
        if self._clock is not None:
            self._clock.wait()
        self._accumulate_rest()

    def _accumulate_ended(self) -> None:
        """What is known of steps that have ended."""
        while self._pending_steps and self._has_passed(self._pending_steps[0][-1].end):
            for timed in self._pending_steps.popleft():
                if timed.stage == "step":
                    self._accumulate_step(timed)
                else:
                    self._step_spans.append(self._accumulate_stage(timed))

    def _accumulate_rest(self) -> None:
        """The same, and what was timed since the last one, where nothing is under way."""
        self._accumulate_ended()
        if not self._pending_steps and self._open_spans and self._has_passed(self._open_spans[-1].end):
            self._step_spans += map(self._accumulate_stage, self._open_spans)
            self._open_spans = []

    def _accumulate_stage(self, timed: _MarkedSpan) -> Span:
        """Count a stage, and before it those inside."""
        begin_s, inside_s = self._to_seconds(timed.begin), 0.0
        for inner in timed.nested:
            span = self._accumulate_stage(inner)
            inside_s += span.end_s - span.begin_s
        span = Span(timed.stage, self._num_steps, begin_s, self._to_seconds(timed.end), inside_s)
        self._seconds[span.stage] = self._seconds.get(span.stage, 0.0) + span.self_s
        if self._recording is not None:
            self._recording.append(span)
        return span

    def _accumulate_step(self, timed: _MarkedSpan) -> None:
        """Count a step."""
        begin_s, end_s = self._to_seconds(timed.begin), self._to_seconds(timed.end)
        inside_s = sum(span.end_s - span.begin_s for span in self._step_spans if span.begin_s >= begin_s)
        if self._recording is not None:
            self._recording.append(Span("step", self._num_steps, begin_s, end_s, inside_s))
        self._step_spans.clear()
        self._num_steps += 1
