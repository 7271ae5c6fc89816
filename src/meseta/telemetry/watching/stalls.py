"""Reports of storage that does not answer: one line for each file system or URL, repeated with a backoff.

Progress is two wake-ups of the waiting thread within STALL_S seconds. A slow write wakes up its thread for the parts
that the disk completes, so a large save that makes progress is no stall, however long it takes. One wake-up is none: a
direct transfer that is not answered wakes up once a minute, and sleeps again.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

from meseta.machine.process_state import state_of
from meseta.machine.ranks import is_launched, rank_number
from meseta.machine.waits.activity import Activity, read_activities, this_process
from meseta.machine.waits.blocked_calls import blocked_calls, mount_of, num_wakeups
from meseta.telemetry.shown import duration
from meseta.telemetry.watching.memory_watch import MemoryWatch

STALL_S = 15.0
"""Seconds without progress after which a wait is reported."""
LOOK_INTERVAL_S = 2.5
MAX_PAUSE_S = 3 * LOOK_INTERVAL_S
"""Looks further apart than this mean that the watcher itself did not run: the time between them counts for nothing."""
BACKOFF_FACTOR = 4.0
MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True)
class WatchedProcess:
    """A process whose waits are watched."""

    process: int
    activities: Sequence[Activity] = ()
    """Its current entries in `meseta.machine.waits.activity`."""
    rank: int | None = None
    """None: the command has one process."""
    mapped: str = ""
    """File that it maps and writes, to which page faults are attributed; '' if it has none."""

    @property
    def name(self) -> str:
        at = f"process {self.process}"
        return at if self.rank is None else f"rank {self.rank} on {socket.gethostname()} ({at})"


@dataclass(frozen=True)
class StallCause:
    """Storage that does not answer. Two causes are equal if their locations are."""

    location: str
    """Mount point or URL of a store; '' for the disk of the memory of a process."""
    text: str = field(compare=False)
    """Noun phrase for messages."""
    is_remote: bool = field(default=False, compare=False)
    """Whether it is a store at a URL."""


@dataclass
class _Wait:
    """A call or request in which one thread sleeps."""

    watched: WatchedProcess
    thread: int
    call: str
    target: str
    """Absolute path or URL; '' if it is unknown."""
    moved_s: float
    """Time of its last progress, or of the look that found it first."""
    num_wakeups: int
    woke_s: float = -math.inf
    """Time of the look that found its last wake-up."""

    @property
    def text(self) -> str:
        if not self.call:
            return f"a page fault{f', as of its mapped file {self.target!r}' if self.target else ''}"
        return f"{self.call} of {self.target!r}"


@dataclass
class _Episode:
    """Storage that does not answer, from the first report to the last wait."""

    began_s: float
    next_report_s: float


class StallWatch:
    """Waits of some processes of this host, looked at every few seconds."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int, int, str], _Wait] = {}
        self._episodes: dict[StallCause, _Episode] = {}
        self._looked_s: float | None = None

    def look(self, processes: Sequence[WatchedProcess], now_s: float) -> list[str]:
        """Return the lines to print, each with 'warning: ' or 'note: '."""
        passed_s, self._looked_s = now_s - (now_s if self._looked_s is None else self._looked_s), now_s
        waits: dict[tuple[int, int, str], _Wait] = {}
        for watched in processes:
            for wait, arguments in _waits(watched, now_s):
                key = watched.process, wait.thread, arguments
                waits[key] = _continued(self._waits.get(key), wait, passed_s)
        self._waits = waits
        by_cause: dict[StallCause, list[_Wait]] = {}
        for wait in waits.values():
            if now_s - wait.moved_s >= STALL_S:
                by_cause.setdefault(_cause(wait.target), []).append(wait)
        return [*self._warnings(by_cause, now_s), *self._notes(by_cause, now_s)]

    def _warnings(self, by_cause: Mapping[StallCause, Sequence[_Wait]], now_s: float) -> list[str]:
        lines = []
        for cause, waits in by_cause.items():
            first = min(waits, key=lambda wait: (not wait.call, wait.moved_s))  # a page fault does not tell its file
            episode = self._episodes.setdefault(cause, _Episode(first.moved_s, now_s))
            if now_s >= episode.next_report_s:
                backoff_s = min((now_s - episode.began_s) * (BACKOFF_FACTOR - 1), MAX_BACKOFF_S)
                episode.next_report_s = now_s + backoff_s
                lines.append(f"warning: {_report(cause, first, waits, now_s)}")
        return lines

    def _notes(self, by_cause: Mapping[StallCause, Sequence[_Wait]], now_s: float) -> list[str]:
        ended = [cause for cause in self._episodes if cause not in by_cause]
        seconds = {cause: now_s - self._episodes.pop(cause).began_s for cause in ended}
        return [f"note: {cause.text} answers again, after {duration(passed)}" for cause, passed in seconds.items()]


def _waits(watched: WatchedProcess, now_s: float) -> list[tuple[_Wait, str]]:
    """Calls and requests under way, each with what tells it from the next one of its thread."""
    state = state_of(watched.process)
    if state is None or state.letter in "TtZX":  # one that is stopped is no matter of storage
        return []
    calls = blocked_calls(watched.process)
    found = [(call.thread, call.call, call.path or watched.mapped, call.arguments) for call in calls]
    requests = [one for one in watched.activities if one.target]
    found += [(one.worker, one.name, one.target, f"{one.target} {one.since_ns}") for one in requests]
    return [
        (_Wait(watched, thread, call, target, now_s, num_wakeups(watched.process, thread)), arguments)
        for thread, call, target, arguments in found
    ]


def _continued(former: _Wait | None, wait: _Wait, passed_s: float) -> _Wait:
    """The wait as it is now, with the time since when it has not moved."""
    if former is None:
        return wait
    now_s, num_new = wait.moved_s, wait.num_wakeups - former.num_wakeups
    wait.woke_s = now_s if num_new else former.woke_s
    if not (num_new > 1 or (num_new and now_s - former.woke_s <= STALL_S)):
        wait.moved_s = former.moved_s + (passed_s if passed_s > MAX_PAUSE_S else 0.0)
    return wait


def _cause(target: str) -> StallCause:
    if not target:
        return StallCause("", "the disk of its memory")
    if not target.startswith("/"):
        parts = urlsplit(target)
        url = f"{parts.scheme}://{parts.netloc}"
        return StallCause(url, url, is_remote=True)
    place, about = mount_of(target)
    return StallCause(place, f"the file system at {place!r}{f' ({about})' if about else ''}")


def _report(cause: StallCause, first: _Wait, waits: Sequence[_Wait], now_s: float) -> str:
    """One line."""
    watched = first.watched
    phases = [one for one in watched.activities if not one.target]
    own = [one for one in phases if one.thread == first.thread]
    phase = " and ".join(dict.fromkeys(one.name for one in (own[-1:] or phases)))
    others = sorted({w.watched.rank for w in waits if w.watched.rank is not None} - {watched.rank})
    more = f"; rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))} too" if others else ""
    check = "the network and the store" if cause.is_remote else "the disk or server behind it"
    return (
        f"{watched.name} has waited {duration(round(now_s - first.moved_s))} for {cause.text}: {first.text}"
        f"{f', while {phase}' if phase else ''}{more}; check {check}; the run continues when it answers"
    )


class StallReports:
    """Context manager with a daemon thread that reports, on standard error, stalls of this process and a control group
    that is nearly full."""

    current: StallReports | None = None
    """The one that is entered in this process."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meseta-stalls", daemon=True)

    def __enter__(self) -> StallReports:
        StallReports.current = self
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Stop the thread, as before a fork. It is not waited for if it is blocked itself."""
        StallReports.current = None
        self._ended.set()
        self._thread.join(LOOK_INTERVAL_S)

    def _run(self) -> None:
        watch, memory, rank = StallWatch(), MemoryWatch(), rank_number() if is_launched() else None
        while not self._ended.wait(LOOK_INTERVAL_S):
            watched = WatchedProcess(os.getpid(), read_activities(this_process.content()), rank)
            for line in [*watch.look([watched], time.monotonic()), *memory.look()]:
                os.write(2, f"{line}\n".encode(errors="replace"))
