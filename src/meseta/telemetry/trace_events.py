"""Conversion of timelines to and from Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

# trace event               timeline
# process                   rank
# thread                    track
# complete event (X)        slice, with times in microseconds
# metadata (M)              names and order of tracks
# flow (s and f)            arrow from the stage that started a transfer to the wait for it
#
# {"ph": "X", "name": "ids", "cat": "transfer", "pid": 1, "tid": 1015, "ts": 120.5, "dur": 900.25,
#  "args": {"step": 11, "intra-host bytes": 4096.0, "wait ms": 0.0}}
#
# Thread ids are unique across processes and start at 1. Time 0 is the start of the first slice.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from meseta.spec.documents import rename_value
from meseta.spec.stages import FORMER_STAGES
from meseta.spec.transfer import FORMER_TRANSFERS
from meseta.telemetry.metrics_file import Count, Entry
from meseta.telemetry.timeline import FORMER_KEYS, IN_FLIGHT, OUTSIDE_STAGES, WAITING, RankClock, Slice, Timeline, Track

TIMELINE_FORMAT = "meseta.timeline/1"
_FORMER_NAMES = {
    "step": dict[str, str](),
    "stage": {**FORMER_STAGES, "in no stage": OUTSIDE_STAGES},
    "transfer": FORMER_TRANSFERS,
}
"""Current name of each former slice and track, by kind."""
_MAX_TRACKS_PER_RANK = 1000
"""Number of thread ids reserved for each rank. Some dozens are used."""
_Microseconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class _RankInfo(Entry):
    host: str
    clock_offset_s: FiniteFloat
    clock_error_s: FiniteFloat


class _TimelineInfo(Entry):
    format: Literal["meseta.timeline/1"]
    first_step: Count
    last_step: Count
    ranks: list[_RankInfo] = Field(min_length=1)


class _EventArgs(Entry):
    name: str = ""
    """Name of the process or thread, in metadata events."""
    step: Count | None = None


class _TraceEvent(Entry):
    ph: str
    name: str
    cat: str = ""
    pid: Count = 0
    tid: Count = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _EventArgs = _EventArgs()


class TraceDocument(Entry):
    """Content of a timeline file."""

    otherData: _TimelineInfo
    traceEvents: list[_TraceEvent]

    def to_timeline(self) -> Timeline:
        """Convert to a timeline whose times are relative to its first slice.

        Tracks without a name, and events of unknown ranks, are ignored.
        """
        about = self.otherData
        names = {
            (event.pid, event.tid): event.args.name
            for event in self.traceEvents
            if (event.ph, event.name) == ("M", "thread_name") and 0 < event.pid <= len(about.ranks)
        }
        kinds: dict[tuple[int, int], Any] = {}
        slices: dict[tuple[int, int], list[Slice]] = {thread: [] for thread in names}
        for event in self.traceEvents:
            thread = event.pid, event.tid
            if event.ph == "X" and thread in names and event.cat in ("step", "stage", "transfer"):
                begin_ns = round(1e3 * event.ts)
                measurements = {
                    rename_value(name, FORMER_KEYS): float(value)
                    for name, value in (event.args.model_extra or {}).items()
                    if isinstance(value, int | float)
                }
                slice_name = rename_value(event.name, _FORMER_NAMES[event.cat])
                one = Slice(slice_name, begin_ns, begin_ns + round(1e3 * event.dur), event.args.step, measurements)
                slices[thread].append(one)
                kinds.setdefault(thread, event.cat)
        return Timeline(
            about.first_step,
            about.last_step,
            tuple(RankClock(one.host, one.clock_offset_s, one.clock_error_s) for one in about.ranks),
            tuple(
                Track(thread[0] - 1, _current_track(names[thread], kinds[thread]), kinds[thread], tuple(of_thread))
                for thread, of_thread in slices.items()
                if of_thread
            ),
        )


def _current_track(name: str, kind: str) -> str:
    subject, suffix, number = name.replace(" under way", IN_FLIGHT).partition(IN_FLIGHT)
    return rename_value(subject, _FORMER_NAMES[kind]) + suffix + number


def to_trace_document(timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline to plain data for JSON."""
    begin_ns = min((one.begin_ns for track in timeline.tracks for one in track.slices), default=0)
    events: list[dict[str, Any]] = []
    for rank, place in enumerate(timeline.ranks):
        events += _metadata_events(rank, 0, "process", f"rank {rank} on {place.host}", rank)
        tracks = [track for track in timeline.tracks if track.rank == rank]
        for index, track in enumerate(tracks):
            thread = _thread_id(rank, index)
            events += _metadata_events(rank, thread, "thread", track.name, index)
            events += [_slice_event(rank, thread, track, one, begin_ns) for one in track.slices]
        events += _flow_events(rank, tracks, begin_ns)
    ranks = [{"host": one.host, "clock_offset_s": one.offset_s, "clock_error_s": one.error_s} for one in timeline.ranks]
    about = {"format": TIMELINE_FORMAT, "first_step": timeline.first, "last_step": timeline.last, "ranks": ranks}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _thread_id(rank: int, index: int) -> int:
    return rank * _MAX_TRACKS_PER_RANK + index + 1


def _metadata_events(rank: int, thread: int, what: str, name: str, place: int) -> list[dict[str, Any]]:
    at = {"ph": "M", "pid": rank + 1, "tid": thread}
    return [
        {**at, "name": f"{what}_name", "args": {"name": name}},
        {**at, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _slice_event(rank: int, thread: int, track: Track, one: Slice, begin_ns: int) -> dict[str, Any]:
    step = {} if one.step is None else {"step": one.step}
    return {
        "ph": "X",
        "name": one.name,
        "cat": track.kind,
        "pid": rank + 1,
        "tid": thread,
        "ts": (one.begin_ns - begin_ns) / 1e3,
        "dur": (one.end_ns - one.begin_ns) / 1e3,
        "args": {**step, **one.args},
    }


def _flow_events(rank: int, tracks: list[Track], begin_ns: int) -> Iterator[dict[str, Any]]:
    stages = sorted(
        (one.begin_ns, one.end_ns, _thread_id(rank, index))
        for index, track in enumerate(tracks)
        if track.kind == "stage"
        for one in track.slices
    )
    number = rank << 32
    for index, track in enumerate(tracks):
        if track.kind != "transfer":
            continue
        begun_ns = 0
        for one in track.slices:
            if one.name != WAITING:
                begun_ns = one.begin_ns
                continue
            place = bisect_right(stages, (begun_ns, float("inf"), 0)) - 1
            if place < 0 or stages[place][1] <= begun_ns:
                continue  # The transfer started outside of stages.
            number += 1
            flow = {"name": "wait", "cat": "flow", "id": number, "pid": rank + 1}
            yield {**flow, "ph": "s", "tid": stages[place][2], "ts": (begun_ns - begin_ns) / 1e3}
            yield {**flow, "ph": "f", "bp": "e", "tid": _thread_id(rank, index), "ts": (one.begin_ns - begin_ns) / 1e3}
