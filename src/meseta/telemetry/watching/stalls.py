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

from meseta.machine.process_state import read_process_state
from meseta.machine.ranks import global_rank, is_distributed
from meseta.machine.waits.activity import Activity, current_activities, read_activities
from meseta.machine.waits.blocked_calls import blocked_calls, find_mount, num_wakeups
from meseta.telemetry.formatting import format_duration
from meseta.telemetry.watching.memory_watch import MemoryWatch

STALL_TIMEOUT_S = 15.0
"""Seconds without progress after which a wait is reported."""
POLL_INTERVAL_S = 2.5
MAX_PAUSE_S = 3 * POLL_INTERVAL_S
"""Looks further apart than this mean that the watcher itself did not run: the time between them counts for nothing."""
BACKOFF_FACTOR = 4.0
MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True)
class WatchedProcess:
    """A process whose waits are watched."""

    pid: int
    activities: Sequence[Activity] = ()
    """Its current entries in `meseta.machine.waits.activity`."""
    rank: int | None = None
    """None: the command has one process."""
    mapped_file: str = ""
    """File that it maps and writes, to which page faults are attributed; '' if it has none."""

    @property
    def name(self) -> str:
        at = f"process {self.pid}"
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
class _StorageWait:
    """A call or request in which one thread sleeps."""

    watched: WatchedProcess
    thread: int
    call: str
    target: str
    """Absolute path or URL; '' if it is unknown."""
    progress_s: float
    """Time of its last progress, or of the look that found it first."""
    num_wakeups: int
    wakeup_s: float = -math.inf
    """Time of the look that found its last wake-up."""

    @property
    def description(self) -> str:
        if not self.call:
            return f"a page fault{f', as of its mapped file {self.target!r}' if self.target else ''}"
        return f"{self.call} of {self.target!r}"


@dataclass
class _StallEpisode:
    """Storage that does not answer, from the first report to the last wait."""

    start_s: float
    next_report_s: float


class StallWatch:
    """Waits of some processes of this host, looked at every few seconds."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int, int, str], _StorageWait] = {}
        self._episodes: dict[StallCause, _StallEpisode] = {}
        self._polled_s: float | None = None

    def poll(self, processes: Sequence[WatchedProcess], now_s: float) -> list[str]:
        """Return the lines to print, each with 'warning: ' or 'note: '."""
        passed_s, self._polled_s = now_s - (now_s if self._polled_s is None else self._polled_s), now_s
        waits: dict[tuple[int, int, str], _StorageWait] = {}
        for watched in processes:
            for wait, arguments in _find_waits(watched, now_s):
                key = watched.pid, wait.thread, arguments
                waits[key] = _update_wait(self._waits.get(key), wait, passed_s)
        self._waits = waits
        by_cause: dict[StallCause, list[_StorageWait]] = {}
        for wait in waits.values():
            if now_s - wait.progress_s >= STALL_TIMEOUT_S:
                by_cause.setdefault(_describe_cause(wait.target), []).append(wait)
        return [*self._warnings(by_cause, now_s), *self._notes(by_cause, now_s)]

    def _warnings(self, by_cause: Mapping[StallCause, Sequence[_StorageWait]], now_s: float) -> list[str]:
        lines = []
        for cause, waits in by_cause.items():
            first = min(waits, key=lambda wait: (not wait.call, wait.progress_s))  # a page fault does not tell its file
            episode = self._episodes.setdefault(cause, _StallEpisode(first.progress_s, now_s))
            if now_s >= episode.next_report_s:
                backoff_s = min((now_s - episode.start_s) * (BACKOFF_FACTOR - 1), MAX_BACKOFF_S)
                episode.next_report_s = now_s + backoff_s
                lines.append(f"warning: {_format_report(cause, first, waits, now_s)}")
        return lines

    def _notes(self, by_cause: Mapping[StallCause, Sequence[_StorageWait]], now_s: float) -> list[str]:
        ended = [cause for cause in self._episodes if cause not in by_cause]
        seconds = {cause: now_s - self._episodes.pop(cause).start_s for cause in ended}
        return [
            f"note: {cause.text} answers again, after {format_duration(passed)}" for cause, passed in seconds.items()
        ]


def _find_waits(watched: WatchedProcess, now_s: float) -> list[tuple[_StorageWait, str]]:
    """Calls and requests under way, each with what tells it from the next one of its thread."""
    state = read_process_state(watched.pid)
    if state is None or state.state_code in "TtZX":  # one that is stopped is no matter of storage
        return []
    calls = blocked_calls(watched.pid)
    found = [(call.thread_id, call.call, call.path or watched.mapped_file, call.arguments) for call in calls]
    requests = [one for one in watched.activities if one.target]
    found += [(one.worker_thread_id, one.name, one.target, f"{one.target} {one.since_ns}") for one in requests]
    return [
        (_StorageWait(watched, thread, call, target, now_s, num_wakeups(watched.pid, thread)), arguments)
        for thread, call, target, arguments in found
    ]


def _update_wait(former: _StorageWait | None, wait: _StorageWait, passed_s: float) -> _StorageWait:
    """The wait as it is now, with the time since when it has not moved."""
    if former is None:
        return wait
    now_s, num_new = wait.progress_s, wait.num_wakeups - former.num_wakeups
    wait.wakeup_s = now_s if num_new else former.wakeup_s
    if not (num_new > 1 or (num_new and now_s - former.wakeup_s <= STALL_TIMEOUT_S)):
        wait.progress_s = former.progress_s + (passed_s if passed_s > MAX_PAUSE_S else 0.0)
    return wait


def _describe_cause(target: str) -> StallCause:
    if not target:
        return StallCause("", "the disk of its memory")
    if not target.startswith("/"):
        parts = urlsplit(target)
        url = f"{parts.scheme}://{parts.netloc}"
        return StallCause(url, url, is_remote=True)
    place, about = find_mount(target)
    return StallCause(place, f"the file system at {place!r}{f' ({about})' if about else ''}")


def _format_report(cause: StallCause, first: _StorageWait, waits: Sequence[_StorageWait], now_s: float) -> str:
    """One line."""
    watched = first.watched
    phases = [one for one in watched.activities if not one.target]
    own = [one for one in phases if one.thread_id == first.thread]
    phase = " and ".join(dict.fromkeys(one.name for one in (own[-1:] or phases)))
    others = sorted({w.watched.rank for w in waits if w.watched.rank is not None} - {watched.rank})
    more = f"; rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))} too" if others else ""
    check = "the network and the store" if cause.is_remote else "the disk or server behind it"
    return (
        f"{watched.name} has waited {format_duration(round(now_s - first.progress_s))} for {cause.text}: "
        f"{first.description}"
        f"{f', while {phase}' if phase else ''}{more}; check {check}; the run continues when it answers"
    )


class StallReporter:
    """Context manager with a daemon thread that reports, on standard error, stalls of this process and a control group
    that is nearly full."""

    current: StallReporter | None = None
    """The one that is entered in this process."""

    def __init__(self) -> None:
        self._should_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meseta-stalls", daemon=True)

    def __enter__(self) -> StallReporter:
        StallReporter.current = self
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the thread, as before a fork. It is not waited for if it is blocked itself."""
        StallReporter.current = None
        self._should_stop.set()
        self._thread.join(POLL_INTERVAL_S)

    def _run(self) -> None:
        watch, memory, rank = StallWatch(), MemoryWatch(), global_rank() if is_distributed() else None
        while not self._should_stop.wait(POLL_INTERVAL_S):
            watched = WatchedProcess(os.getpid(), read_activities(current_activities.content()), rank)
            for line in [*watch.poll([watched], time.monotonic()), *memory.poll()]:
                os.write(2, f"{line}\n".encode(errors="replace"))
