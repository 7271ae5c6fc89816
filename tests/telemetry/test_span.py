"""Times of stages: nesting, steps, and timing of a device without waiting for it."""

from __future__ import annotations

import numpy as np
import pytest

from meseta.telemetry.span import DeviceClock, Span, StageTimes
from meseta.telemetry.timeline import make_rank_tracks


class Stream:
    """Simulated device with one stream and its own clock. Work runs after all work that was started before."""

    def __init__(self) -> None:
        self.host_s = 100.0
        self.done_s = 0.0
        """Time at which all started work is complete."""
        self.num_waits = self.num_asked_early = 0

    def compute(self, seconds: float) -> None:
        """Start work without blocking the host."""
        self.done_s = max(self.done_s, self.host_s) + seconds

    def wait(self) -> None:
        self.num_waits += 1
        self.host_s = max(self.host_s, self.done_s)


class Event:
    """Event like torch.cuda.Event(enable_timing=True), whose differences have 32 bits."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.passed_s = stream, -1.0

    def record(self, stream: Stream) -> None:
        self.stream, self.passed_s = stream, max(stream.done_s, stream.host_s)

    def query(self) -> bool:
        return self.stream.host_s >= self.passed_s

    def elapsed_time(self, other: Event) -> float:
        self.stream.num_asked_early += not (self.query() and other.query())  # torch would raise
        return float(np.float32(1e3 * (other.passed_s - self.passed_s)))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr("meseta.telemetry.span.time.perf_counter", lambda: stream.host_s)
    return stream


def timed(stream: Stream) -> StageTimes:
    return StageTimes(DeviceClock(lambda: Event(stream), lambda: stream, stream.wait))


def step(times: StageTimes, stream: Stream) -> None:
    """Run 1 s of forward, and 2 s of backward with 3 s of update inside. The host is done after 0.4 s."""
    times.begin_step()
    with times.stage("dense_forward"):
        stream.compute(1.0)
        stream.host_s += 0.1
    with times.stage("backward"):
        stream.compute(1.5)
        with times.stage("table_update"):
            stream.host_s += 0.2
            stream.compute(3.0)
        stream.compute(0.5)
    stream.compute(0.25)
    stream.host_s += 0.1
    times.end_step()


def test_a_device_is_timed_by_its_stream_without_waiting(stream: Stream) -> None:
    times = timed(stream)
    for _ in range(3):
        step(times, stream)
    assert times.pop_means() == {}  # the host is 18 s ahead
    stream.host_s += 7.0
    assert times.pop_means() == pytest.approx({"dense_forward": 1.0, "backward": 2.0, "table_update": 3.0})
    stream.host_s += 1000.0
    step(times, stream)
    stream.host_s += 10.0
    assert times.pop_means() == pytest.approx({"dense_forward": 1.0, "backward": 2.0, "table_update": 3.0})
    assert times.lifetime_means() == pytest.approx({"dense_forward": 1.0, "backward": 2.0, "table_update": 3.0})
    assert stream.num_waits == 1 and not stream.num_asked_early  # only before the very first stage


def test_idle_time_of_a_device_counts_for_the_stage_of_the_host(stream: Stream) -> None:
    times = timed(stream)
    times.begin_step()
    with times.stage("data"):
        stream.host_s += 2.0
    times.end_step()
    assert times.pop_means() == {"data": pytest.approx(2.0)}


def test_recorded_spans_of_a_device_use_the_clock_of_the_host(stream: Stream) -> None:
    """The times stay precise after days, although the difference of two events has few digits."""
    times = timed(stream)
    step(times, stream)
    stream.host_s += 300_000.125
    times.start_recording()
    began_s = stream.host_s
    step(times, stream)
    spans = times.stop_recording()
    assert [(span.stage, span.step) for span in spans] == [
        ("dense_forward", 1), ("table_update", 1), ("backward", 1), ("step", 1)
    ]  # fmt: skip
    assert spans[0].begin_s == pytest.approx(began_s, abs=0.02)
    assert [span.end_s - spans[0].begin_s for span in spans] == pytest.approx([1.0, 5.5, 6.0, 6.25], abs=1e-5)
    assert spans[-1].self_s == pytest.approx(0.25, abs=1e-5)
    step(times, stream)
    assert times.stop_recording() == []


def test_stages_between_steps_belong_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("meseta.telemetry.span.time.perf_counter", lambda: float(next(clock)))
    times = StageTimes()
    times.start_recording()
    for _ in range(2):
        times.begin_step()
        with times.stage("lookup"):
            pass
        with times.stage("backward"), pytest.raises(ValueError, match="refused"), times.stage("agree"):
            with times.stage("gradient_dist"):
                pass
            raise ValueError("refused")
        times.end_step()
        with times.stage("dense_update"):
            pass
    spans = times.stop_recording()
    assert spans[:5] == [
        Span("lookup", 0, 1.0, 2.0, 0.0),
        Span("gradient_dist", 0, 5.0, 6.0, 0.0),
        Span("backward", 0, 3.0, 7.0, 1.0),  # 'agree' has raised and does not count
        Span("step", 0, 0.0, 8.0, 5.0),
        Span("dense_update", 1, 9.0, 10.0, 0.0),
    ]
    assert spans[-2] == Span("step", 1, 11.0, 19.0, 5.0)


def test_copies_on_a_side_stream_use_the_clock_of_the_host(stream: Stream) -> None:
    """The stages are as long as without copies, and copies before the last event that was read are included."""
    side, times = Stream(), timed(stream)
    step(times, stream)
    with times.time_copy(7, side):  # before recording starts
        pass
    stream.host_s += 100.0
    times.start_recording()
    began_s = stream.host_s
    for number in range(2):
        side.host_s = stream.host_s
        with times.time_copy(1000 + number, side):
            side.compute(0.5)
        step(times, stream)
    spans = times.stop_recording()
    side.host_s = stream.host_s
    copies = times.pop_recorded_copies()
    assert [(one.step, one.num_bytes) for one in copies] == [(1, 1000), (2, 1001)]
    assert [one.begin_s - began_s for one in copies] == pytest.approx([0.0, 0.4 + 0.1], abs=0.11)
    assert [one.end_s - one.begin_s for one in copies] == pytest.approx([0.5, 0.5], abs=1e-4)
    assert [span.stage for span in spans].count("step") == 2
    tracks = make_rank_tracks(0, spans, [], copies=copies, first=10)
    [track] = [track for track in tracks if track.kind == "transfer"]
    assert track.name == "copies in flight"
    assert [(one.step, one.args) for one in track.slices] == [
        (12, {"bytes to the device": 1000}),
        (13, {"bytes to the device": 1001}),
    ]
    assert times.pop_recorded_copies() == []
    times.start_recording()
    assert times.pop_recorded_copies() == []
