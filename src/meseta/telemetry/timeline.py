"""Some steps of a run as tracks of slices: what each rank did at every moment, and what travelled meanwhile.

    rank 0    step             |  step 11                                        |between steps|  step 12
              lookup           |    ███                                                             ███
              backward         |                     ████      ████                                           ...
              table_update     |                         ██████
              in no stage      | ▌     ▌           ▌                █
              ids under way    |        ──────────────────────────                     of batch 12, while 11 is computed
              answers under way|       ──────▓▓▓▓                                      ▓ waiting

A rank is in one stage at a time: a stage is drawn without what lies in others inside it, and "in no stage" is what is
left of a step. So the slices of a rank's stages in a step add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meseta.errors import MesetaError
from meseta.spec.stages import STAGE_NAMES
from meseta.spec.transfer import TABLE_TRANSFERS
from meseta.telemetry.span import CopySpan, Span
from meseta.telemetry.transfers import TransferSpan

TIMELINE_FILE = "timeline.json"
STEP, BETWEEN_STEPS, OUTSIDE_STAGES, WAITING = "step", "between steps", "in no stage", "waiting"
UNDER_WAY = " under way"
"""Part of the names of tracks of transfers and copies."""
COPIES = f"copies{UNDER_WAY}"
"""Of batches to a GPU, on a stream of their own, where one is after the other."""
HOST_BYTES, OTHER_HOSTS_BYTES, DEVICE_BYTES = "bytes to its host", "bytes to other hosts", "bytes to the device"
"""Keys of `Slice.args` of transfers and copies."""
MAX_TIMELINE_STEPS = 100
"""Of a timeline: some thousand slices a step on eight ranks."""
DEFAULT_NUM_STEPS, NUM_WARM_UP_STEPS = 10, 10
"""Steps of a timeline where nothing else is asked for, and steps before them: the first ones of a process are longer,
since memory is taken and threads are started."""
Kind = Literal["step", "stage", "transfer"]


class Slice(NamedTuple):
    """A piece of time on a track."""

    name: str
    begin_ns: int
    """On the clock of rank 0."""
    end_ns: int
    step: int | None
    """Its number in the run, from 1: of a transfer, that in which it began; None between steps."""
    args: Mapping[str, float] = {}
    """Bytes and the like, by name."""


@dataclass(frozen=True)
class Track:
    """Slices of one kind of one rank, in the order of their beginnings. They do not overlap, but that the last part of
    a transfer may be a slice of its own, WAITING, behind it."""

    rank: int
    name: str
    kind: Kind
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class RankClock:
    """The clock of a rank."""

    host: str
    """Where it is, as that calls itself."""
    offset_s: float
    """What is added to its time.perf_counter() to have that of rank 0."""
    error_s: float
    """How far that may be off; 0 where both are one clock."""


@dataclass(frozen=True)
class Timeline:
    """What all ranks did in some steps."""

    first: int
    """Of these steps, by their number in the run, from 1."""
    last: int
    ranks: tuple[RankClock, ...]
    tracks: tuple[Track, ...] = field(repr=False)

    def select_tracks(self, rank: int, kind: Kind) -> list[Track]:
        """Tracks of a rank."""
        return [track for track in self.tracks if (track.rank, track.kind) == (rank, kind)]

    def steps(self, rank: int) -> list[Slice]:
        """The steps of a rank, without what lies between them."""
        return [one for track in self.select_tracks(rank, "step") for one in track.slices if one.name != BETWEEN_STEPS]


class StepRange(NamedTuple):
    """Steps of a run, by their number from 1, both ends among them."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> StepRange:
        """Of "FIRST:LAST", or of one number. Raises MesetaError for anything else, and for too many."""
        first, colon, last = text.partition(":")
        numbers = [part for part in (first, last if colon else first) if part.isascii() and part.isdigit()]
        if len(numbers) < 2 or len(text) > 40:
            raise MesetaError(f"--profile-steps must be FIRST:LAST, as 101:110, got {text[:40]!r}")
        steps = StepRange(*map(int, numbers))
        if not 1 <= steps.first <= steps.last:
            raise MesetaError(f"--profile-steps must count up from 1, got {text!r}; name the first step, then the last")
        if steps.num_steps > MAX_TIMELINE_STEPS:
            raise MesetaError(
                f"--profile-steps {text} are {steps.num_steps:,} steps; a timeline has {MAX_TIMELINE_STEPS} at most"
            )
        return steps

    @property
    def num_steps(self) -> int:
        """How many."""
        return self.last - self.first + 1

    @staticmethod
    def default_after(done: int, num_steps: int) -> StepRange:
        """Those that are profiled where nothing else is asked for, of a process that does the steps behind `done` up to
        `num_steps`: behind its first ones, which are longer."""
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
    """The tracks of one rank, those without slices left out.

    Args:
        rank: whose.
        spans: stages and steps as `StageTimes.stop_recording` gives them.
        transfers: as `TransferTimes.stop_recording` gives them.
        offset_s: added to all times.
        first: steps of the run before the one that counts as 0 in spans and transfers.
        copies: as `StageTimes.pop_recorded_copies` gives them.
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
        figures = {
            HOST_BYTES: one.intra_host_bytes,
            OTHER_HOSTS_BYTES: one.inter_host_bytes,
            "other ranks": one.num_peers,
            "ms waited for": round(1e3 * one.wait_s, 6),
        }
        number = None if one.step is None else first + one.step + 1
        begin_ns, end_ns = ns(one.begin_s), ns(max(one.done_s, one.begin_s))
        slices.append(Slice(one.name, begin_ns, end_ns, number, figures))
        waiting_ns = max(ns(one.done_s - one.wait_s), begin_ns)
        if waiting_ns < end_ns:
            slices.append(Slice(WAITING, waiting_ns, end_ns, number))
    listed = [*(name for name in TABLE_TRANSFERS if name in of_transfers), *of_transfers]
    for name in dict.fromkeys(listed):
        for index, apart in enumerate(_split_overlapping(of_transfers[name])):
            shown = f"{name}{UNDER_WAY}" + f" ({index + 1})" * (index > 0)
            tracks.append(Track(rank, shown, "transfer", tuple(apart)))
    return [track for track in tracks if track.slices]


def split_nested(timed: Iterable[Slice]) -> list[Slice]:
    """Each slice without those inside it, in pieces that do not overlap, in the order of time; what lies inside another
    one comes before it."""
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
        # What the clock of a device rounds may end a little behind what it lies in.
        opened.append(one._replace(end_ns=min(one.end_ns, opened[-1].end_ns)) if opened else one)
    close(None)
    return pieces


def _insert_gaps(steps: Sequence[Slice]) -> Iterator[Slice]:
    """Steps, and what lies between them."""
    before: Slice | None = None
    for step in steps:
        if before is not None and before.end_ns < step.begin_ns:
            yield Slice(BETWEEN_STEPS, before.end_ns, step.begin_ns, None)
        yield step._replace(name=f"step {step.step}")
        before = step


def _split_overlapping(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices by track so that those of one do not overlap: as few tracks as can be. A waiting goes with its own."""
    tracks: list[list[Slice]] = []
    place = 0
    for one in slices:
        if one.name != WAITING:
            ends = [max(other.end_ns for other in track[-2:]) for track in tracks]
            place = next((index for index, end_ns in enumerate(ends) if end_ns <= one.begin_ns), len(tracks))
            if place == len(tracks):
                tracks.append([])
        tracks[place].append(one)
    return tracks
