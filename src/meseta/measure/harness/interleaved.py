"""Timing several contenders in turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meseta.machine.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits
from meseta.measure.harness.worker_group import TargetSpec, TimedWindow, WorkerGroup
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """How much time is spent, and what counts as undisturbed."""

    num_starts: int = 2
    """Times that every process is started anew: where its memory comes to lie changes its speed."""
    num_rounds: int = 3
    """Windows of each action and start."""
    window_s: float = 0.25
    """Length of a window."""
    max_background_load: float = 0.15
    """A window in which others kept more processors busy than this is repeated."""
    max_retries: int = 4
    """Repetitions of a disturbed window before it is taken as it is."""


@dataclass(frozen=True)
class Timing:
    """All windows of one action."""

    windows: tuple[TimedWindow, ...]
    max_background_load: float

    @property
    def quiet_windows(self) -> tuple[TimedWindow, ...]:
        """Windows in which nobody else used the processor."""
        return tuple(window for window in self.windows if window.background_load <= self.max_background_load)

    @property
    def is_noisy(self) -> bool:
        """Whether most windows were disturbed, and the median is over those too."""
        return 2 * len(self.quiet_windows) < len(self.windows)

    @property
    def seconds(self) -> float:
        """Median seconds of a call."""
        windows = self.windows if self.is_noisy else self.quiet_windows
        return statistics.median(window.seconds_per_call for window in windows)


@dataclass
class TimingResult:
    """What a contest found."""

    timings: dict[tuple[str, str, int], Timing] = field(default_factory=dict)
    """(title of the member, action, threads) -> windows."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Title -> what the contender says of itself."""
    failures: dict[str, str] = field(default_factory=dict)
    """Title -> why it has no figures."""

    def seconds(self, member: TargetSpec, action: str, num_threads: int) -> float | None:
        """Median seconds of a call, None where it was not timed."""
        timing = self.timings.get((member.title, action, num_threads))
        return timing.seconds if timing else None


def run_interleaved(
    members: Sequence[TargetSpec],
    timing: TimingOptions,
    log: Callable[[str], None],
    *,
    memory_bytes: float | None = None,
) -> TimingResult:
    """Time every action of every member.

    As many members as fit into `memory_bytes` (None: most of what is free) run at a time and take turns window by
    window; the others follow, and all of it is repeated from the start of the processes on.
    """
    windows: dict[tuple[str, str, int], list[TimedWindow]] = {}
    outcome = TimingResult()
    free_bytes = _memory_budget() if memory_bytes is None else memory_bytes
    for _ in range(timing.num_starts):
        for group in memory_groups(members, free_bytes):
            _run_group([m for m in group if m.title not in outcome.failures], timing, outcome, windows, log)
    outcome.timings = {key: Timing(tuple(found), timing.max_background_load) for key, found in windows.items()}
    return outcome


def memory_groups(members: Sequence[TargetSpec], memory_bytes: float) -> Iterator[list[TargetSpec]]:
    """Neighbours that fit into the memory together; at least one at a time."""
    group: list[TargetSpec] = []
    for member in members:
        if group and sum(m.memory_bytes for m in group) + member.memory_bytes > memory_bytes:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _run_group(
    members: Sequence[TargetSpec],
    timing: TimingOptions,
    outcome: TimingResult,
    windows: dict[tuple[str, str, int], list[TimedWindow]],
    log: Callable[[str], None],
) -> None:
    teams: dict[str, WorkerGroup] = {}
    num_calls: dict[tuple[str, str, int], int] = {}
    try:
        for member in members:
            log(f"start {member.title}")
            with _record_failures(member, outcome):
                teams[member.title] = WorkerGroup(member)
                outcome.facts[member.title] = teams[member.title].facts
        actions = list(dict.fromkeys(a for team in teams.values() for a in team.facts["actions"]))
        threads = sorted({n for member in members for n in member.thread_counts}, reverse=True)
        for _ in range(timing.num_rounds):
            for action, num in ((a, n) for n in threads for a in actions):
                for title, team in list(teams.items()):
                    if action not in team.facts["actions"] or num not in team.spec.thread_counts:
                        continue
                    key = (title, action, num)
                    with _record_failures(team.spec, outcome):
                        if key not in num_calls:
                            num_calls[key] = _calls_per_window(team, action, num, timing.window_s)
                        windows.setdefault(key, []).append(_time_window(team, action, num_calls[key], num, timing))
                    if title in outcome.failures:
                        teams.pop(title).close()
    finally:
        for team in teams.values():
            team.close()


@contextmanager
def _record_failures(member: TargetSpec, outcome: TimingResult) -> Iterator[None]:
    """Turns an error of a member into a line of `failures`, and the others go on."""
    try:
        yield
    except MesetaError as error:
        outcome.failures[member.title] = str(error)


def _calls_per_window(team: WorkerGroup, action: str, num_threads: int, window_s: float) -> int:
    """Calls that fill a window; warms up on the way."""
    team.time(action, 1, num_threads)
    calls = 1
    while True:
        spent_s = team.time(action, calls, num_threads).seconds_per_call * calls
        if spent_s > window_s / 4:
            return max(1, round(calls * window_s / spent_s))
        calls *= 4


def _time_window(team: WorkerGroup, action: str, calls: int, num_threads: int, timing: TimingOptions) -> TimedWindow:
    """A quiet window; where none is to be had, the quietest."""
    found: list[TimedWindow] = []
    while len(found) <= timing.max_retries:
        found.append(team.time(action, calls, num_threads))
        if found[-1].background_load <= timing.max_background_load:
            return found[-1]
    return min(found, key=lambda window: window.background_load)


def _memory_budget() -> float:
    """Three quarters of what the system could give."""
    system = KernelFiles()
    free = free_memory_bytes(system, read_cgroup_limits(system))
    return 8e9 if free is None else 0.75 * free
