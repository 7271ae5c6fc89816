"""Check of the memory limit of control groups before a start, and warnings when it is nearly reached."""

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

from meseta.errors import MesetaError
from meseta.system.kernel import KernelFiles, read_cgroup_limits, tightest_cgroup
from meseta.system.processes import read_process_state
from meseta.system.ranks import global_rank, is_distributed
from meseta.system.waits import (
    Activity,
    blocked_calls,
    current_activities,
    find_mount,
    num_wakeups,
    read_activities,
)
from meseta.telemetry.formatting import format_bytes, format_duration, format_quantity

# With torch 2.13 for CPUs and Python 3.11, the kernel killed the process in a group of 241 MB. With a higher limit it
# used 255 MB.
MIN_START_BYTES = 245_000_000
"""Minimum memory of a process that imports torch and opens its dataset."""
# Measured by tests/cli/test_memory_limits.py: 350 MB on 2 ranks and 464 MB on 4.
MIN_RANK_BYTES = 52_000_000
"""Additional memory of each rank of `--nproc`, until its model is planned."""
MIN_FREE_RATIO = 0.04
"""Share of a memory limit below which a warning is printed."""
_RAISE_LIMIT_HINT = "raise the limit (memory.max of the group, docker run --memory)"


def check_start_memory(num_ranks: int, system: KernelFiles | None = None) -> None:
    """Raise MesetaError if the control group of this process allows less memory than a start on `num_ranks` needs."""
    # The kernel would kill the process without a message.
    limit = read_cgroup_limits(system or KernelFiles()).memory_bytes
    need = MIN_START_BYTES + (MIN_RANK_BYTES * num_ranks if num_ranks > 1 else 0)
    if limit is None or limit >= need:
        return
    fewer = ", or use fewer ranks (--nproc)" if num_ranks > 1 else ""
    raise MesetaError(
        f"the control group allows {format_bytes(limit)} of memory, but a start on "
        f"{format_quantity(num_ranks, 'rank')} needs "
        f"{format_bytes(need)} before any table: {_RAISE_LIMIT_HINT}{fewer}"
    )


def cgroup_limit_text(system: KernelFiles | None = None) -> str:
    """Return a phrase such as 'memory of its control group (300 MB)', or 'memory of this machine' without a limit."""
    memory = tightest_cgroup(system or KernelFiles())
    return (
        "memory of this machine"
        if memory is None
        else (f"memory of its control group ({format_bytes(memory.limit_bytes)})")
    )


class MemoryWatch:
    """Watcher that warns when the memory of a control group is nearly exhausted.

    It warns once. It warns again if the memory recovers in between, or if the limit changes.
    """

    def __init__(self, system: KernelFiles | None = None) -> None:
        self._system = system or KernelFiles()
        self._warned: tuple[str, int] | None = None

    def poll(self) -> list[str]:
        """Return the warnings to print."""
        memory = tightest_cgroup(self._system)
        if memory is None or memory.unclaimed_bytes >= MIN_FREE_RATIO * memory.limit_bytes:
            self._warned = None
            return []
        key = memory.folder, memory.limit_bytes
        if key == self._warned:
            return []
        self._warned = key
        return [
            f"warning: {format_bytes(memory.unclaimed_bytes)} are left of the {format_bytes(memory.limit_bytes)} of "
            f"memory "
            f"that control group '/{memory.folder}' allows; the kernel kills a process of this run when none is left; "
            f"{_RAISE_LIMIT_HINT}, or use smaller tables or batches"
        ]


# A slow write wakes up its thread for each part that the disk completes, so a large save is not a stall. A single
# wake-up is no progress, because the thread of a blocked direct transfer wakes up once per minute.


STALL_TIMEOUT_S = 15.0
"""Seconds without progress after which a wait is reported."""
POLL_INTERVAL_S = 2.5
# After a longer pause the watcher itself did not run.
MAX_PAUSE_S = 3 * POLL_INTERVAL_S
"""Maximum seconds between polls that count as waiting time."""
BACKOFF_FACTOR = 4.0
MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True)
class WatchedProcess:
    """Process whose waits are watched."""

    pid: int
    activities: Sequence[Activity] = ()
    rank: int | None = None
    """Rank of the process. `None` if the command has a single process."""
    mapped_file: str = ""
    """Mapped file to which page faults of the process are attributed. Empty if it has none."""

    @property
    def name(self) -> str:
        at = f"process {self.pid}"
        return at if self.rank is None else f"rank {self.rank} on {socket.gethostname()} ({at})"


@dataclass(frozen=True)
class StallCause:
    """Storage that does not respond. Two causes are equal if their locations are equal."""

    location: str
    """Mount point, or URL of a store. Empty for page faults without a known file."""
    text: str = field(compare=False)
    is_remote: bool = field(default=False, compare=False)
    """Whether the storage is a store at a URL."""


@dataclass
class _StorageWait:
    """Call or request in which a thread sleeps."""

    watched: WatchedProcess
    thread: int
    call: str
    target: str
    """Absolute path or URL. Empty if it is unknown."""
    progress_s: float
    """Time of the last progress, or of the first poll that found this wait."""
    num_wakeups: int
    wakeup_s: float = -math.inf
    """Time of the poll that found the thread's last wake-up."""

    @property
    def description(self) -> str:
        if not self.call:
            return f"a page fault{f', as of its mapped file {self.target!r}' if self.target else ''}"
        return f"{self.call} of {self.target!r}"


@dataclass
class _StallEpisode:
    """Report state of storage that does not respond, until the last wait for it ends."""

    start_s: float
    next_report_s: float


class StallWatch:
    """Detector of stalls in processes of this host, which is polled every few seconds."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int, int, str], _StorageWait] = {}
        self._episodes: dict[StallCause, _StallEpisode] = {}
        self._polled_s: float | None = None

    def poll(self, processes: Sequence[WatchedProcess], now_s: float) -> list[str]:
        """Return the lines to print, which start with 'warning: ' or 'note: '."""
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
            # Prefer a system call, because the file of a page fault is uncertain.
            first = min(waits, key=lambda wait: (not wait.call, wait.progress_s))
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
    """Return the current waits as (wait, key). The key differs between successive waits of a thread."""
    state = read_process_state(watched.pid)
    if state is None or state.state_code in "TtZX":  # A stopped process does not wait for storage.
        return []
    calls = blocked_calls(watched.pid)
    sources = [(call.thread_id, call.call, call.path or watched.mapped_file, call.arguments) for call in calls]
    requests = [one for one in watched.activities if one.target]
    sources += [(one.worker_thread_id, one.name, one.target, f"{one.target} {one.since_ns}") for one in requests]
    return [
        (_StorageWait(watched, thread, call, target, now_s, num_wakeups(watched.pid, thread)), arguments)
        for thread, call, target, arguments in sources
    ]


def _update_wait(former: _StorageWait | None, wait: _StorageWait, passed_s: float) -> _StorageWait:
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
    watched = first.watched
    phases = [one for one in watched.activities if not one.target]
    of_thread = [one for one in phases if one.thread_id == first.thread]
    # Without a phase of the waiting thread, all phases of the process are possible.
    phase = " and ".join(dict.fromkeys(one.name for one in (of_thread[-1:] or phases)))
    more_ranks = sorted({w.watched.rank for w in waits if w.watched.rank is not None} - {watched.rank})
    more = f"; rank{'s' * (len(more_ranks) > 1)} {', '.join(map(str, more_ranks[:8]))} too" if more_ranks else ""
    check = "the network and the store" if cause.is_remote else "the disk or server behind it"
    return (
        f"{watched.name} has waited {format_duration(round(now_s - first.progress_s))} for {cause.text}: "
        f"{first.description}"
        f"{f', while {phase}' if phase else ''}{more}; check {check}; the run continues when it answers"
    )


class StallReporter:
    """Context manager whose daemon thread prints warnings to standard error.

    It reports stalls of this process, and a control group whose memory is nearly exhausted.
    """

    current: StallReporter | None = None
    """Active reporter of this process, or `None`."""

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
        """Stop the thread, for example before a fork. Waits at most `POLL_INTERVAL_S` for it."""
        StallReporter.current = None
        self._should_stop.set()
        self._thread.join(POLL_INTERVAL_S)

    def _run(self) -> None:
        watch, memory, rank = StallWatch(), MemoryWatch(), global_rank() if is_distributed() else None
        while not self._should_stop.wait(POLL_INTERVAL_S):
            watched = WatchedProcess(os.getpid(), read_activities(current_activities.content()), rank)
            for line in [*watch.poll([watched], time.monotonic()), *memory.poll()]:
                os.write(2, f"{line}\n".encode(errors="replace"))
