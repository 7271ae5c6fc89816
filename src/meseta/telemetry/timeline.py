"""Timeline of some steps of a run: stages, transfers and copies of each rank.

    rank 0    step                |  step 11                                        |between steps|  step 12
              lookup              |    ███                                                             ███
              backward            |                     ████      ████                                           ...
              table_update        |                         ██████
              outside stages      | ▌     ▌           ▌                █
              ids in flight       |        ──────────────────────────                (ids of batch 12, during step 11)
              embeddings in flight|       ──────▓▓▓▓                                 (▓ waiting)

Slices of stages do not include nested stages, and "outside stages" is the rest of a step. The slices of all stages
of a rank therefore add up to the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat

from meseta.errors import MesetaError
from meseta.spec.documents import rename_value
from meseta.spec.stages import FORMER_STAGES, STAGE_NAMES
from meseta.spec.transfer import FORMER_TRANSFERS, TABLE_TRANSFERS
from meseta.telemetry.metrics_file import Count, Entry
from meseta.telemetry.span import CopySpan, Span, TransferSpan

TIMELINE_FILE = "timeline.json"
STEP, BETWEEN_STEPS, OUTSIDE_STAGES, WAITING = "step", "between steps", "outside stages", "waiting"
IN_FLIGHT = " in flight"
"""Suffix of the names of tracks of transfers and copies."""
COPIES = f"copies{IN_FLIGHT}"
"""Track of copies of batches to a GPU. They have their own stream, so they do not overlap."""
INTRA_HOST_BYTES, INTER_HOST_BYTES, DEVICE_BYTES = "intra-host bytes", "inter-host bytes", "bytes to the device"
NUM_PEERS, WAIT_MS = "peers", "wait ms"
"""Keys of `Slice.args` for transfers and copies."""
FORMER_KEYS = {
    "bytes to its host": INTRA_HOST_BYTES,
    "bytes to other hosts": INTER_HOST_BYTES,
    "other ranks": NUM_PEERS,
    "ms waited for": WAIT_MS,
}
"""Current name of each former key of `Slice.args`."""
# A step has some thousand slices on eight ranks.
MAX_TIMELINE_STEPS = 100
"""Maximum number of steps of a timeline."""
# The first steps of a process are longer, because memory is allocated and threads are started.
DEFAULT_NUM_STEPS, NUM_WARM_UP_STEPS = 10, 10
"""Default number of steps of a timeline, and number of steps skipped before it."""
Kind = Literal["step", "stage", "transfer"]


class Slice(NamedTuple):
    """Time interval on a track."""

    name: str
    begin_ns: int
    """Start time on the clock of rank 0."""
    end_ns: int
    step: int | None
    """Step in which the slice starts, counted from 1 in the run. `None` between steps."""
    args: Mapping[str, float] = {}


@dataclass(frozen=True)
class Track:
    """Slices of one kind of one rank, ordered by start time.

    Slices do not overlap, except that a slice `WAITING` may cover the end of the transfer before it.
    """

    rank: int
    name: str
    kind: Kind
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class RankClock:
    """Clock of a rank, relative to that of rank 0."""

    host: str
    offset_s: float
    """Seconds to add to the rank's time.perf_counter() to get the time of rank 0."""
    error_s: float
    """Maximum error of `offset_s`. It is 0 if both ranks have the same clock."""


@dataclass(frozen=True)
class Timeline:
    """Timeline of all ranks for a range of steps."""

    first: int
    """First step, counted from 1 in the run."""
    last: int
    """Last step, counted from 1 in the run."""
    ranks: tuple[RankClock, ...]
    tracks: tuple[Track, ...] = field(repr=False)

    def select_tracks(self, rank: int, kind: Kind) -> list[Track]:
        """Return the tracks of one kind of a rank."""
        return [track for track in self.tracks if (track.rank, track.kind) == (rank, kind)]

    def steps(self, rank: int) -> list[Slice]:
        """Return the slices of a rank's steps, without the gaps between steps."""
        return [one for track in self.select_tracks(rank, "step") for one in track.slices if one.name != BETWEEN_STEPS]


class StepRange(NamedTuple):
    """Inclusive range of steps of a run, counted from 1."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> StepRange:
        """Parse "FIRST:LAST", or a single number. Raises MesetaError if the text is invalid or has too many steps."""
        first, colon, last = text.partition(":")
        numbers = [part for part in (first, last if colon else first) if part.isascii() and part.isdigit()]
        if len(numbers) < 2 or len(text) > 40:
            raise MesetaError(f"--profile-steps must be FIRST:LAST, as 101:110, got {text[:40]!r}")
        steps = StepRange(*map(int, numbers))
        if not 1 <= steps.first <= steps.last:
            raise MesetaError(
                f"--profile-steps must satisfy 1 <= FIRST <= LAST, got {text!r}; give the first step, then the last"
            )
        if steps.num_steps > MAX_TIMELINE_STEPS:
            raise MesetaError(
                f"--profile-steps {text} are {steps.num_steps:,} steps, but a timeline has at most "
                f"{MAX_TIMELINE_STEPS}; choose a shorter range"
            )
        return steps

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1

    @staticmethod
    def default_after(done: int, num_steps: int) -> StepRange:
        """Return the default range for a process that executes the steps after `done` up to `num_steps`."""
        warm_up = min(NUM_WARM_UP_STEPS, (num_steps - done) // 2)
        return StepRange(done + warm_up + 1, min(done + warm_up + DEFAULT_NUM_STEPS, num_steps))


def make_rank_tracks(
    rank: int,
    spans: Sequence[Span],
    transfers: Sequence[TransferSpan],
    offset_s: float = 0.0,
    first: int = 0,
    copies: Sequence[CopySpan] = (),
) -> list[Track]:
    """Return all tracks of one rank that have slices.

    `spans`, `transfers` and `copies` are the results of `StageTimes.stop_recording`, `TransferTimes.stop_recording` and
    `StageTimes.pop_recorded_copies`. `offset_s` is added to all times. `first` is the number of steps of the run before
    their step 0.
    """

    def ns(seconds: float) -> int:
        return round(1e9 * (seconds + offset_s))

    timed = [Slice(span.stage, ns(span.begin_s), ns(span.end_s), first + span.step + 1) for span in spans]
    steps = sorted((one for one in timed if one.name == STEP), key=lambda one: one.begin_ns)
    by_name: dict[str, list[Slice]] = {name: [] for name in (*STAGE_NAMES, OUTSIDE_STAGES)}
    for piece in split_nested(timed):
        by_name[OUTSIDE_STAGES if piece.name == STEP else piece.name].append(piece)
    tracks = [
        Track(rank, STEP, "step", tuple(_insert_gaps(steps))),
        *(Track(rank, name, "stage", tuple(slices)) for name, slices in by_name.items()),
    ]
    copied = [
        Slice("copy", ns(one.begin_s), ns(one.end_s), first + one.step + 1, {DEVICE_BYTES: one.num_bytes})
        for one in copies
    ]
    tracks.append(Track(rank, COPIES, "transfer", tuple(copied)))
    of_transfers: dict[str, list[Slice]] = {}
    for one in sorted(transfers, key=lambda one: one.begin_s):
        slices = of_transfers.setdefault(one.name, [])
        measurements = {
            INTRA_HOST_BYTES: one.intra_host_bytes,
            INTER_HOST_BYTES: one.inter_host_bytes,
            NUM_PEERS: one.num_peers,
            WAIT_MS: round(1e3 * one.wait_s, 6),
        }
        number = None if one.step is None else first + one.step + 1
        begin_ns, end_ns = ns(one.begin_s), ns(max(one.done_s, one.begin_s))
        slices.append(Slice(one.name, begin_ns, end_ns, number, measurements))
        waiting_ns = max(ns(one.done_s - one.wait_s), begin_ns)
        if waiting_ns < end_ns:
            slices.append(Slice(WAITING, waiting_ns, end_ns, number))
    listed = [*(name for name in TABLE_TRANSFERS if name in of_transfers), *of_transfers]
    for name in dict.fromkeys(listed):
        for index, apart in enumerate(_split_overlapping(of_transfers[name])):
            shown = f"{name}{IN_FLIGHT}" + f" ({index + 1})" * (index > 0)
            tracks.append(Track(rank, shown, "transfer", tuple(apart)))
    return [track for track in tracks if track.slices]


def split_nested(timed: Iterable[Slice]) -> list[Slice]:
    """Split nested slices into pieces that do not overlap, ordered by time.

    A nested slice has to come before the enclosing one in `timed`.
    """
    pieces: list[Slice] = []
    opened: list[Slice] = []
    order = sorted(enumerate(timed), key=lambda entry: (entry[1].begin_ns, -entry[1].end_ns, -entry[0]))
    reached_ns = order[0][1].begin_ns if order else 0

    def close(until_ns: int | None) -> None:
        nonlocal reached_ns
        while opened and (until_ns is None or opened[-1].end_ns <= until_ns):
            inner = opened.pop()
            put(inner, inner.end_ns)
        if opened and until_ns is not None:
            put(opened[-1], until_ns)

    def put(one: Slice, end_ns: int) -> None:
        nonlocal reached_ns
        if end_ns > reached_ns:
            pieces.append(one._replace(begin_ns=reached_ns, end_ns=end_ns))
            reached_ns = end_ns

    for _, one in order:
        close(one.begin_ns)
        reached_ns = max(reached_ns, one.begin_ns)
        # With the rounding of a device clock, a slice may end slightly after the enclosing one.
        opened.append(one._replace(end_ns=min(one.end_ns, opened[-1].end_ns)) if opened else one)
    close(None)
    return pieces


def _insert_gaps(steps: Sequence[Slice]) -> Iterator[Slice]:
    before: Slice | None = None
    for step in steps:
        if before is not None and before.end_ns < step.begin_ns:
            yield Slice(BETWEEN_STEPS, before.end_ns, step.begin_ns, None)
        yield step._replace(name=f"step {step.step}")
        before = step


def _split_overlapping(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Distribute slices to as few tracks as possible so that they do not overlap.

    A slice `WAITING` stays in the track of its transfer.
    """
    tracks: list[list[Slice]] = []
    place = 0
    for one in slices:
        if one.name != WAITING:
            # The last two slices may be a transfer and its waiting.
            ends = [max(other.end_ns for other in track[-2:]) for track in tracks]
            place = next((index for index, end_ns in enumerate(ends) if end_ns <= one.begin_ns), len(tracks))
            if place == len(tracks):
                tracks.append([])
        tracks[place].append(one)
    return tracks


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
