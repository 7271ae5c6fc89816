"""The ranks of a launcher, watched by their records: one that does not run, one astray, one that others wait for."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from meseta.errors import MesetaError
from meseta.machine.time_limits import TimeLimits
from meseta.machine.waits.blocked_calls import is_held
from meseta.telemetry.diagnosis import Settling, Trouble, find_astray, find_stuck, find_trouble
from meseta.telemetry.hearts import Hearts
from meseta.telemetry.rank_record import SIZE, VARIABLE, RankState, has_begun, read_state, record_file, record_path
from meseta.telemetry.watching.memory_watch import MemoryWatch
from meseta.telemetry.watching.stalls import LOOK_INTERVAL_S, StallWatch, WatchedProcess

PERIOD_S = 1.0
"""Between looks at the records."""
BEGIN_S = 60.0
"""A rank that has just been started and has not come to its first line is waited for at least so long."""


class RankWatch:
    """Records of ranks that are about to be started on this host, and what can be seen in them; a context manager."""

    def __init__(self, num_ranks: int, limits: TimeLimits, run_dir: Path | None = None) -> None:
        """With `run_dir` their files may get names there."""
        self.limits = limits
        self._run_dir = run_dir
        self._files = [record_file(run_dir or Path(tempfile.gettempdir())) for _ in range(num_ranks)]
        self._looked_s = time.monotonic()
        self._hearts = Hearts(range(num_ranks), self._looked_s)
        self._settling = Settling()
        self._warned: set[tuple[int, ...]] = set()
        self._stalls, self._memory = StallWatch(), MemoryWatch()
        self._stalls_looked_s = self._looked_s

    def variables(self, rank: int) -> dict[str, str]:
        """What a rank finds in its environment."""
        return {VARIABLE: f"/proc/self/fd/{self._files[rank]}"}

    def look(self, running: Sequence[bool]) -> tuple[Trouble | None, list[str]]:
        """Look at the ranks that have not ended, once a second. Return (trouble, lines to print); the trouble is None
        if the run can continue."""
        now_s = time.monotonic()
        if now_s - self._looked_s < PERIOD_S:
            return None, []
        self._looked_s = now_s
        states = {rank: state for rank, state in self.states().items() if running[rank]}
        silent = self._hearts.listen({rank: state.beat_ns for rank, state in states.items()}, now_s)
        first_s = max(self.limits.silent_s, BEGIN_S)
        silent = {r: s for r, s in silent.items() if running[r] and (self._hearts.has_beaten(r) or s > first_s)}
        silent = {r: s for r, s in silent.items() if not self._waits_for_storage(states.get(r), s)}
        now_ns = time.monotonic_ns()
        trouble = self._settling.lasting(find_trouble(states, silent, now_ns, self.limits), now_s)
        warning = self._warning(states, now_ns)
        return trouble, [*([f"warning: {warning}"] if warning else []), *self._stall_lines(states, now_s)]

    def _waits_for_storage(self, state: RankState | None, silent_s: float) -> bool:
        """Whether the heartbeat of a rank is late because the disk of its record does not answer. That is reported as a
        stall, and ends the run only after `stall_s`."""
        if state is None or not self.limits.silent_s < silent_s <= self.limits.stall_s:
            return False
        return is_held(state.pid)

    def _stall_lines(self, states: Mapping[int, RankState], now_s: float) -> list[str]:
        if now_s - self._stalls_looked_s < LOOK_INTERVAL_S:
            return []
        self._stalls_looked_s = now_s
        watched = [
            WatchedProcess(
                state.pid,
                state.activities,
                rank,
                mapped="" if self._run_dir is None else str(record_path(self._run_dir.absolute(), rank)),
            )
            for rank, state in states.items()
        ]
        return [*self._stalls.look(watched, now_s), *(self._memory.look() if watched else [])]

    def _warning(self, states: Mapping[int, RankState], now_ns: int) -> str | None:
        """Once for each rank that keeps others waiting for long, but not yet for too long."""
        trouble = find_stuck(states, now_ns, self.limits.warn_s)
        if trouble is None:
            self._warned.clear()
        elif trouble.ranks not in self._warned and _in_step(states):
            self._warned.add(trouble.ranks)
            return f"{trouble.text}; the run is ended after {self.limits.stall_s:g} s (comm.stall_s)"
        return None

    def astray(self) -> Trouble | None:
        """Of ranks that have ended, and noticed nothing: whether they have taken other transfers than each other."""
        return find_astray(self.states())

    def states(self) -> Mapping[int, RankState]:
        """What can be read of them."""
        states = {}
        for rank, descriptor in enumerate(self._files):
            content = os.pread(descriptor, SIZE, 0)
            if has_begun(content):
                with suppress(MesetaError):  # it is being written
                    states[rank] = read_state(content, f"of rank {rank}")
        return states

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._files:
            os.close(descriptor)


def _in_step(states: Mapping[int, RankState]) -> bool:
    """Whether a step is under way: what is planned, loaded or saved may take its time."""
    return any(state.stage for state in states.values())


def limits_of(run_dir: Path) -> TimeLimits:
    """As the config of a run says; those of every run where it cannot be read, which its ranks will tell."""
    from meseta.config import load_config

    try:
        return load_config(run_dir / "config.yaml").comm.time_limits
    except (MesetaError, OSError):
        return TimeLimits()
