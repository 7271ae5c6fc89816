"""Timing of the stages of a step, on the host or on a device stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from meseta.spec.stages import StageName
from meseta.telemetry.rank_record import CurrentRankRecord


class Span(NamedTuple):
    """Timed stage, or whole step."""

    stage: StageName | Literal["step"]
    """Name of the stage. 'step' is a whole step from `begin_step` to `end_step`."""
    step: int
    """Number of steps that were timed before this one."""
    begin_s: float
    """Start time on the clock of time.perf_counter()."""
    end_s: float
    nested_s: float
    """Total seconds of the spans inside this one."""

    @property
    def self_s(self) -> float:
        """Seconds of this span without the spans inside it."""
        return self.end_s - self.begin_s - self.nested_s


class CopySpan(NamedTuple):
    """Timed copy of a batch to a device, which overlaps with computation."""

    step: int
    """Number of steps that were timed before the step in which the copy started."""
    num_bytes: int
    begin_s: float
    """Start time on the clock of time.perf_counter()."""
    end_s: float


class DeviceClock:
    """Clock that measures stages with events in a device stream.

    Events are read only after the device has passed them. The host therefore waits at the first event only.
    """

    # The length of a stage is the time between its two events. Host work that a busy device hides takes no time, and
    # host work for which the device is idle counts.

    def __init__(
        self, new_event: Callable[[], Any], current_stream: Callable[[], Any], wait: Callable[[], object]
    ) -> None:
        """Create a clock that is not aligned yet.

        Args:
            new_event: Function that returns a new event, such as torch.cuda.Event(enable_timing=True).
            current_stream: Function that returns the current stream. It is called once per step.
            wait: Function that synchronizes with the device.
        """
        self._new_event, self._current_stream, self.wait = new_event, current_stream, wait
        self._stream: Any = None
        self._last: Any = None
        self._last_s = 0.0
        self._reference: tuple[Any, float] = None, 0.0
        """Event at the last alignment, and its time in seconds."""

    def begin_step(self) -> None:
        """Use the current stream for all marks until the next call."""
        self._stream = self._current_stream()  # This takes longer than recording an event.

    def mark(self, stream: Any = None) -> Any:
        """Record an event in a stream, by default that of the step, and return it."""
        if self._last is None:
            self.align()
        event = self._new_event()
        event.record(self._stream if stream is None else stream)
        return event

    def align(self) -> None:
        """Align the clock with the host's clock. All earlier marks must have been read."""
        self.wait()  # An idle stream passes an event immediately.
        self.begin_step()
        self._last = self._new_event()
        self._last.record(self._stream)
        self._last_s = time.perf_counter()
        self._reference = self._last, self._last_s

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has passed an event."""
        return bool(mark.query())

    def to_seconds(self, mark: Any) -> float:
        """Return the time of an event in the step's stream. Call it in the order of the events."""
        # Differences between events are float32, which is precise for few seconds only. Add up short differences.
        self._last_s += 1e-3 * self._last.elapsed_time(mark)
        self._last = mark
        return self._last_s

    def to_seconds_any_stream(self, mark: Any) -> float:
        """Return the time of an event in any stream, in any order. The last alignment must be recent."""
        event, at_s = self._reference
        return at_s + 1e-3 * float(event.elapsed_time(mark))


class _MarkedSpan:
    # `begin` and `end` are seconds, or events of a device.

    __slots__ = ("begin", "end", "nested", "stage")

    def __init__(self, stage: StageName | Literal["step"], begin: Any, end: Any = None) -> None:
        self.stage, self.begin, self.end = stage, begin, end
        self.nested: list[_MarkedSpan] = []


class StageTimes:
    """Timer of stages. Time of a nested stage is not counted for the enclosing one."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        """Create a timer that uses the clock of a device, by default the host's clock."""
        self._recording: list[Span] | None = None
        self._copies: list[tuple[int, int, Any, Any]] = []
        """Copies since `start_recording`: fields of `CopySpan`, with marks in place of seconds."""
        self._clock = clock
        self._pending_steps: deque[list[_MarkedSpan]] = deque()
        """Steps that are not accumulated yet. Each has its outermost stages, ordered by their end, and then itself."""
        self._open_spans: list[_MarkedSpan] = []
        """Completed spans inside the current stage or step."""
        self._step_begin: Any = None
        self._seconds: dict[str, float] = {}
        self._lifetime_seconds: dict[str, float] = {}
        self._num_steps = self._num_reported_steps = 0
        self._step_spans: list[Span] = []
        """Outermost stages since the last accumulated step."""

    @contextmanager
    def stage(self, name: StageName) -> Iterator[None]:
        """Context manager that times a stage. If it raises, only stages that were completed inside it count."""
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
        """Context manager that times a copy in another stream. Copies are only timed while recording."""
        begin = None if self._recording is None else self._mark(stream)
        yield
        if begin is not None:
            self._copies.append((self._num_steps + len(self._pending_steps), num_bytes, begin, self._mark(stream)))

    def begin_step(self) -> None:
        """Start a step. Stages since the end of the previous step are not part of it."""
        if self._clock is not None:
            self._clock.begin_step()
        self._step_begin = self._mark()

    def end_step(self) -> None:
        """Finish the current step."""
        end = self._mark()
        self._open_spans.append(_MarkedSpan("step", end if self._step_begin is None else self._step_begin, end))
        self._pending_steps.append(self._open_spans)
        self._open_spans, self._step_begin = [], None
        self._accumulate_ended()

    def pop_means(self) -> dict[str, float]:
        """Return the mean seconds per step of each stage since the last call.

        Steps that a device has not completed yet count in a later call. Call it between steps.
        """
        self._accumulate_rest()
        num_steps, self._num_reported_steps = self._num_steps - self._num_reported_steps, self._num_steps
        seconds, self._seconds = self._seconds, {}
        for name, spent_s in seconds.items():
            self._lifetime_seconds[name] = self._lifetime_seconds.get(name, 0.0) + spent_s
        return {name: spent_s / max(num_steps, 1) for name, spent_s in seconds.items()}

    def lifetime_means(self) -> dict[str, float]:
        """Return the mean seconds per step of each stage, over all steps that `pop_means` has returned."""
        return {name: spent_s / max(self._num_reported_steps, 1) for name, spent_s in self._lifetime_seconds.items()}

    def start_recording(self) -> None:
        """Start to record spans. Call it between steps. Waits for the device."""
        self._accumulate_all()
        if self._clock is not None:
            self._clock.align()
        self._recording = []

    def stop_recording(self) -> list[Span]:
        """Stop recording and return the spans, nested ones first. Call it between steps. Waits for the device."""
        self._accumulate_all()
        spans, self._recording = self._recording or [], None
        return spans

    def pop_recorded_copies(self) -> list[CopySpan]:
        """Return the recorded copies. Call it after `stop_recording`."""
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
        # Steps that the device has not completed stay pending, so that the host does not wait.
        while self._pending_steps and self._has_passed(self._pending_steps[0][-1].end):
            for timed in self._pending_steps.popleft():
                if timed.stage == "step":
                    self._accumulate_step(timed)
                else:
                    self._step_spans.append(self._accumulate_stage(timed))

    def _accumulate_rest(self) -> None:
        """Accumulate completed steps, and the stages after the last step if all steps are complete."""
        self._accumulate_ended()
        if not self._pending_steps and self._open_spans and self._has_passed(self._open_spans[-1].end):
            self._step_spans += map(self._accumulate_stage, self._open_spans)
            self._open_spans = []

    def _accumulate_stage(self, timed: _MarkedSpan) -> Span:
        # Nested stages are converted between the two ends, because `to_seconds` needs the order of the events.
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
        begin_s, end_s = self._to_seconds(timed.begin), self._to_seconds(timed.end)
        inside_s = sum(span.end_s - span.begin_s for span in self._step_spans if span.begin_s >= begin_s)
        if self._recording is not None:
            self._recording.append(Span("step", self._num_steps, begin_s, end_s, inside_s))
        self._step_spans.clear()
        self._num_steps += 1
