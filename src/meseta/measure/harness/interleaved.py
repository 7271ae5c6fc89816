"""Interleaved timing of several benchmark targets, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meseta.measure.harness.worker_group import TargetSpec, TimedWindow, WorkerGroup
from meseta.spec import MesetaError
from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """Duration of a benchmark, and its tolerance of background load."""

    # The placement of its memory changes the speed of a process, and differs between starts.
    num_starts: int = 2
    """Number of times that all processes are started."""
    num_rounds: int = 3
    """Number of timed windows per action and start."""
    window_s: float = 0.25
    """Approximate duration of a timed window."""
    max_background_load: float = 0.15
    max_retries: int = 4


@dataclass(frozen=True)
class Timing:
    """All timed windows of one action of one target."""

    windows: tuple[TimedWindow, ...]
    max_background_load: float

    @property
    def quiet_windows(self) -> tuple[TimedWindow, ...]:
        """Windows whose background load is at most `max_background_load`."""
        return tuple(window for window in self.windows if window.background_load <= self.max_background_load)

    @property
    def is_noisy(self) -> bool:
        """Whether fewer than half of the windows are quiet. `seconds` is then the median of all windows."""
        return 2 * len(self.quiet_windows) < len(self.windows)

    @property
    def seconds(self) -> float:
        """Median seconds per call, of the quiet windows unless `is_noisy`."""
        windows = self.windows if self.is_noisy else self.quiet_windows
        return statistics.median(window.seconds_per_call for window in windows)


@dataclass
class TimingResult:
    """Timings of all targets of a benchmark."""

    timings: dict[tuple[str, str, int], Timing] = field(default_factory=dict)
    """Timing by title of the target, action and number of threads."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Result of `BenchmarkTarget.facts` by title of the target."""
    failures: dict[str, str] = field(default_factory=dict)
    """Error message by title, for targets that failed."""

    def seconds(self, member: TargetSpec, action: str, num_threads: int) -> float | None:
        """Return the median seconds per call, or `None` if the action was not timed."""
        timing = self.timings.get((member.title, action, num_threads))
        return timing.seconds if timing else None


def run_interleaved(
    members: Sequence[TargetSpec],
    timing: TimingOptions,
    log: Callable[[str], None],
    *,
    memory_bytes: float | None = None,
) -> TimingResult:
    """Time every action of every target in `members`.

    Timed windows alternate between the targets of a group that fits into `memory_bytes`, by default most of the free
    memory. All is repeated with new processes, `num_starts` times in total. A target that fails is listed in
    `failures`.
    """
    # Keys are the title of the target, the action and the number of threads.
    windows: dict[tuple[str, str, int], list[TimedWindow]] = {}
    outcome = TimingResult()
    free_bytes = _memory_budget() if memory_bytes is None else memory_bytes
    for _ in range(timing.num_starts):
        for group in memory_groups(members, free_bytes):
            _run_group([m for m in group if m.title not in outcome.failures], timing, outcome, windows, log)
    outcome.timings = {key: Timing(tuple(timed), timing.max_background_load) for key, timed in windows.items()}
    return outcome


def memory_groups(members: Sequence[TargetSpec], memory_bytes: float) -> Iterator[list[TargetSpec]]:
    """Yield consecutive targets in groups that fit into `memory_bytes`. A larger target is a group alone."""
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
        # Alternate between targets for each action and number of threads.
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
    """Context manager that records a MesetaError of `member` in `failures` instead of raising it."""
    try:
        yield
    except MesetaError as error:
        outcome.failures[member.title] = str(error)


def _calls_per_window(team: WorkerGroup, action: str, num_threads: int, window_s: float) -> int:
    """Return the number of calls that take about `window_s`. Also warms up the action."""
    team.time(action, 1, num_threads)
    calls = 1
    while True:
        spent_s = team.time(action, calls, num_threads).seconds_per_call * calls
        if spent_s > window_s / 4:
            return max(1, round(calls * window_s / spent_s))
        calls *= 4


def _time_window(team: WorkerGroup, action: str, calls: int, num_threads: int, timing: TimingOptions) -> TimedWindow:
    """Time windows until one is quiet. Returns the quietest one if retries are exhausted."""
    windows: list[TimedWindow] = []
    while len(windows) <= timing.max_retries:
        windows.append(team.time(action, calls, num_threads))
        if windows[-1].background_load <= timing.max_background_load:
            return windows[-1]
    return min(windows, key=lambda window: window.background_load)


def _memory_budget() -> float:
    system = KernelFiles()
    free = free_memory_bytes(system, read_cgroup_limits(system))
    # The rest is for the page cache and other programs.
    return 8e9 if free is None else 0.75 * free
