"""Timing of the stages of a step, on the host or on a device stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from typing import Any, Literal, NamedTuple

from meseta.spec.stages import StageName
from meseta.spec.transfer import STEP_TRANSFERS
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
    """Clock that measures stages with events in a device stream. It reads events that the device has passed, so the
    host waits at the first one only."""

    # The length of a stage is the time between its two events. Host work that a busy device hides takes no time, and
    # host work for which the device is idle counts.

    def __init__(
        self, new_event: Callable[[], Any], current_stream: Callable[[], Any], wait: Callable[[], object]
    ) -> None:
        """Create a clock that is not aligned yet.

        `new_event` returns a new event, such as torch.cuda.Event(enable_timing=True). `current_stream` returns the
        current stream, and is called once per step. `wait` synchronizes with the device.
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

    def has_passed(self, event: Any) -> bool:
        """Whether the device has passed an event."""
        return bool(event.query())

    def to_seconds(self, event: Any) -> float:
        """Return the time of an event in the step's stream. Call it in the order of the events."""
        # Differences between events are float32, which is precise for few seconds only. Add up short differences.
        self._last_s += 1e-3 * self._last.elapsed_time(event)
        self._last = event
        return self._last_s

    def to_seconds_any_stream(self, event: Any) -> float:
        """Return the time of an event in any stream, in any order. The last alignment must be recent."""
        reference, at_s = self._reference
        return at_s + 1e-3 * float(reference.elapsed_time(event))


class _MarkedSpan:
    # `begin` and `end` are seconds, or events of a device.

    __slots__ = ("begin", "captured", "end", "nested", "num_steps", "stage")

    def __init__(self, stage: StageName | Literal["step"], begin: Any, end: Any = None) -> None:
        self.stage, self.begin, self.end = stage, begin, end
        self.nested: list[_MarkedSpan] = []
        self.num_steps = 1
        """Number of steps for which the span counts."""
        self.captured: CapturedStages | None = None
        """Captured stages of which this is the last one."""

    def count_for(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for span in self.nested:
            span.count_for(num_steps)


class CapturedStages:
    """Stages of a step in a CUDA graph. Each replay records their events again."""

    def __init__(self) -> None:
        self.spans: list[_MarkedSpan] = []
        self.is_pending = False
        """Whether the times of the last replay were not read yet. The graph must not be replayed then."""


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
        self._step_begin: Any = None
        self._captured_mark: Callable[[], Any] | None = None
        """Function that marks the stages of a captured step. `None` outside of a capture."""
        self._seconds: dict[str, float] = {}
        self._lifetime_seconds: dict[str, float] = {}
        self._num_steps = self._num_reported_steps = 0
        self._step_spans: list[Span] = []

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

    @contextmanager
    def capture(self, mark: Callable[[], Any]) -> Iterator[CapturedStages]:
        """Context manager around the capture of a step in a CUDA graph.

        `mark` records a new event in the graph and returns it. If it returns `None`, the stages cannot be timed.
        """
        captured = CapturedStages()
        outer, self._open_spans = self._open_spans, captured.spans
        self._captured_mark = mark
        try:
            yield captured
        finally:
            self._open_spans, self._captured_mark = outer, None

    def add_replay(self, captured: CapturedStages, num_steps: int) -> None:
        """Add the stages of a replayed graph to the current step. They stand for `num_steps` steps."""
        for span in captured.spans:
            span.count_for(num_steps)
        if captured.spans:
            captured.spans[-1].captured, captured.is_pending = captured, True
        self._open_spans += captured.spans

    @property
    def is_recording(self) -> bool:
        """Whether spans are recorded."""
        return self._recording is not None

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
        if self._captured_mark is not None:
            return self._captured_mark()
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
        self._seconds[span.stage] = self._seconds.get(span.stage, 0.0) + span.self_s * timed.num_steps
        if timed.captured is not None:
            timed.captured.is_pending = False
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


FORMER_KEYS = {
    "num_times": "num_calls",
    "inside_bytes": "intra_host_bytes",
    "across_bytes": "inter_host_bytes",
    "waited_s": "wait_s",
}
"""Current name of each former key in metrics.jsonl and summary.json."""
NUM_RECENT_SPANS = 4096
"""Number of recent spans that are kept. Older spans only count in the sums."""


class TransferSpan(NamedTuple):
    """Collective of this rank, from its start to the use of the received data."""

    name: str
    """Name of the transfer, see meseta.spec.transfer."""
    step: int | None
    """Number of steps completed before the step in which the collective started. `None` between steps, for example in
    an evaluation."""
    num_peers: int
    intra_host_bytes: float
    """Bytes sent to ranks of the same host."""
    inter_host_bytes: float
    """Bytes sent to ranks of other hosts."""
    begin_s: float
    """Start time on the clock of time.perf_counter()."""
    done_s: float
    """Time at which the end was detected, at the latest in the wait for the collective."""
    wait_s: float
    """Seconds that this rank was blocked by the collective. On a GPU the stream waits, not the rank."""


@dataclass(frozen=True)
class TransferMeans:
    """Measurements of one transfer of a rank, per step or in total."""

    num_calls: float
    """Number of collectives."""
    intra_host_bytes: float
    """Bytes sent to ranks of the same host."""
    inter_host_bytes: float
    """Bytes sent to ranks of other hosts."""
    seconds: float
    """Seconds from the start of the transfer to the detection of its end."""
    wait_s: float
    """Seconds that the rank was blocked by the transfer."""

    def __add__(self, other: TransferMeans) -> TransferMeans:
        return TransferMeans(*map(add, vars(self).values(), vars(other).values()))

    def __truediv__(self, num_steps: int) -> TransferMeans:
        return TransferMeans(*(value / num_steps for value in vars(self).values()))


class TransferTimes:
    """Sums of bytes and seconds by transfer, since the last `pop_means` and in total. Only spans of steps count."""

    def __init__(self) -> None:
        self.recent_spans: deque[TransferSpan] = deque(maxlen=NUM_RECENT_SPANS)
        """Last spans, ordered by their end."""
        self.step: int | None = None
        """Number of steps completed before the current one. `None` between steps."""
        self._recording: list[TransferSpan] | None = None
        self._num_steps = 0
        self._sums: dict[str, TransferMeans] = {}
        self._lifetime_sums: dict[str, TransferMeans] = {}
        self._num_reported_steps = 0

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """Context manager around a step. A step that raises is not counted."""
        self.step = self._num_steps
        try:
            yield
            self._num_steps += 1
        finally:
            self.step = None

    def add(self, span: TransferSpan) -> None:
        self.recent_spans.append(span)
        if self._recording is not None:
            self._recording.append(span)
        if span.step is not None:
            seconds = span.done_s - span.begin_s
            one = TransferMeans(1, span.intra_host_bytes, span.inter_host_bytes, seconds, span.wait_s)
            _add_to_sums(self._sums, span.name, one)

    def start_recording(self) -> None:
        self._recording = []

    def stop_recording(self) -> list[TransferSpan]:
        """Stop recording and return the recorded spans, ordered by their end."""
        spans, self._recording = self._recording or [], None
        return spans

    def pop_means(self) -> dict[str, TransferMeans]:
        """Return the means per step of each transfer since the last call."""
        num_steps, self._num_reported_steps = self._num_steps - self._num_reported_steps, self._num_steps
        sums, self._sums = self._sums, {}
        for name, one in sums.items():
            _add_to_sums(self._lifetime_sums, name, one)
        return _per_step(sums, num_steps)

    def lifetime_means(self) -> dict[str, TransferMeans]:
        """Return the means per step of each transfer, over all steps that `pop_means` has returned."""
        return _per_step(self._lifetime_sums, self._num_reported_steps)


def _add_to_sums(sums: dict[str, TransferMeans], name: str, one: TransferMeans) -> None:
    sums[name] = sums[name] + one if name in sums else one


def _per_step(sums: dict[str, TransferMeans], num_steps: int) -> dict[str, TransferMeans]:
    return {name: one / max(num_steps, 1) for name, one in sums.items() if name in STEP_TRANSFERS}


NO_READER = "no reader"
"""Key for waiting time without a reader."""


FORMER_ROW_WAIT_KEYS = {"wire_s": "transfer_s"}
"""Current name of each former key in metrics.jsonl and summary.json."""


@dataclass(frozen=True)
class RowWait:
    """Time that a rank was blocked waiting for rows of a reader, per step or in total."""

    storage_s: float = 0.0
    """Seconds while the reader waited for storage."""
    decode_s: float = 0.0
    """Seconds while the reader decoded prepared data."""
    transform_s: float = 0.0
    """Seconds while the reader parsed and encoded raw rows."""
    transfer_s: float = 0.0
    """Seconds for all other causes with an assigned reader: transmission, or a reader that was busy or blocked."""
    no_lease_s: float = 0.0
    """Seconds without an assigned reader, including requests to the dispatcher."""

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: RowWait) -> RowWait:
        return RowWait(*map(add, vars(self).values(), vars(other).values()))

    def scaled(self, factor: float) -> RowWait:
        """Return all values multiplied by `factor`."""
        return RowWait(*(value * factor for value in vars(self).values()))


class RowWaits:
    """Sums of waiting times by reader, since the last `pop_means` and in total."""

    def __init__(self) -> None:
        self._sums: dict[str, RowWait] = {}
        self._lifetime_sums: dict[str, RowWait] = {}
        self._num_steps = 0

    def add(self, waits: Mapping[str, RowWait], share: float = 1.0) -> None:
        """Add the share `share` of each wait in `waits`, by reader."""
        for reader, wait in waits.items():
            self._sums[reader] = self._sums.get(reader, RowWait()) + wait.scaled(share)

    def pop_means(self, num_steps: int) -> dict[str, RowWait]:
        """Return the mean waits per step since the last call, by reader. `num_steps` is the number of these steps."""
        sums, self._sums = self._sums, {}
        self._num_steps += num_steps
        for reader, wait in sums.items():
            self._lifetime_sums[reader] = self._lifetime_sums.get(reader, RowWait()) + wait
        return _mean_waits(sums, num_steps)

    def lifetime_means(self) -> dict[str, RowWait]:
        """Return the mean waits per step, by reader, over all steps passed to `pop_means`."""
        return _mean_waits(self._lifetime_sums, self._num_steps)


def _mean_waits(sums: Mapping[str, RowWait], num_steps: int) -> dict[str, RowWait]:
    return {reader: wait.scaled(1.0 / max(num_steps, 1)) for reader, wait in sums.items()}
