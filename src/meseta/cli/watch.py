"""Watches the ranks of a launcher by their records, and detects unresponsive, diverged and stuck ranks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from meseta.errors import MesetaError
from meseta.system.time_limits import TimeLimits
from meseta.system.waits import is_blocked
from meseta.telemetry.diagnosis import Diagnosis, DivergenceGracePeriod, diagnose, find_diverged, find_stuck
from meseta.telemetry.rank_record import (
    RANK_RECORD_VARIABLE,
    RECORD_BYTES,
    RankState,
    create_record_file,
    is_initialized,
    parse_record,
    record_path,
)
from meseta.telemetry.watching import POLL_INTERVAL_S, HeartbeatMonitor, MemoryWatch, StallWatch, WatchedProcess

RECORD_POLL_INTERVAL_S = 1.0
"""Seconds between two reads of the records."""
STARTUP_GRACE_S = 60.0
"""Minimum seconds until a rank without any heartbeat counts as unresponsive. It may still be starting."""


class RankWatch:
    """Context manager with the records of the ranks of this host. Create it before the ranks start."""

    def __init__(self, num_ranks: int, limits: TimeLimits, run_dir: Path | None = None) -> None:
        """Create one record per rank. With `run_dir`, their files may get names there."""
        self.limits = limits
        self._run_dir = run_dir
        self._files = [create_record_file(run_dir or Path(tempfile.gettempdir())) for _ in range(num_ranks)]
        self._last_poll_s = time.monotonic()
        self._heartbeats = HeartbeatMonitor(range(num_ranks), self._last_poll_s)
        self._divergence_grace = DivergenceGracePeriod()
        self._warned: set[tuple[int, ...]] = set()
        self._stalls, self._memory = StallWatch(), MemoryWatch()
        self._last_stall_poll_s = self._last_poll_s

    def environ(self, rank: int) -> dict[str, str]:
        """Return the environment variables that pass the record to a rank."""
        # The rank inherits the open descriptor.
        return {RANK_RECORD_VARIABLE: f"/proc/self/fd/{self._files[rank]}"}

    def poll(self, running: Sequence[bool]) -> tuple[Diagnosis | None, list[str]]:
        """Check the running ranks, once per second. Returns (diagnosis, or `None` to continue, lines to print)."""
        now_s = time.monotonic()
        if now_s - self._last_poll_s < RECORD_POLL_INTERVAL_S:
            return None, []
        self._last_poll_s = now_s
        states = {rank: state for rank, state in self.read_states().items() if running[rank]}
        silent = self._heartbeats.update({rank: state.heartbeat_ns for rank, state in states.items()}, now_s)
        # A rank without any heartbeat may still be importing its modules.
        first_s = max(self.limits.heartbeat_timeout_s, STARTUP_GRACE_S)
        silent = {r: s for r, s in silent.items() if running[r] and (self._heartbeats.has_heartbeat(r) or s > first_s)}
        silent = {r: s for r, s in silent.items() if not self._waits_for_storage(states.get(r), s)}
        now_ns = time.monotonic_ns()
        trouble = self._divergence_grace.filter_diagnosis(diagnose(states, silent, now_ns, self.limits), now_s)
        warning = self._warning(states, now_ns)
        return trouble, [*([f"warning: {warning}"] if warning else []), *self._stall_lines(states, now_s)]

    def _waits_for_storage(self, state: RankState | None, silent_s: float) -> bool:
        """Whether a heartbeat is late because the disk of its record does not answer. Such a stall ends the run only
        after `stall_timeout_s`."""
        if state is None or not self.limits.heartbeat_timeout_s < silent_s <= self.limits.stall_timeout_s:
            return False
        return is_blocked(state.pid)

    def _stall_lines(self, states: Mapping[int, RankState], now_s: float) -> list[str]:
        if now_s - self._last_stall_poll_s < POLL_INTERVAL_S:
            return []
        self._last_stall_poll_s = now_s
        watched = [
            WatchedProcess(
                state.pid,
                state.activities,
                rank,
                mapped_file="" if self._run_dir is None else str(record_path(self._run_dir.absolute(), rank)),
            )
            for rank, state in states.items()
        ]
        return [*self._stalls.poll(watched, now_s), *(self._memory.poll() if watched else [])]

    def _warning(self, states: Mapping[int, RankState], now_ns: int) -> str | None:
        """Return a warning about ranks that keep others waiting, once per set of ranks."""
        trouble = find_stuck(states, now_ns, self.limits.warn_delay_s)
        if trouble is None:
            self._warned.clear()
        # Planning, loading and saving may take longer than a step.
        elif trouble.ranks not in self._warned and any(state.stage for state in states.values()):
            self._warned.add(trouble.ranks)
            return f"{trouble.text}; the run is stopped after {self.limits.stall_timeout_s:g} s (comm.stall_timeout_s)"
        return None

    def find_diverged(self) -> Diagnosis | None:
        """Return a diagnosis if ranks that ended without an error made different transfers, or `None`."""
        return find_diverged(self.read_states())

    def read_states(self) -> Mapping[int, RankState]:
        """Return the state of each rank whose record is initialized and complete."""
        states = {}
        for rank, descriptor in enumerate(self._files):
            content = os.pread(descriptor, RECORD_BYTES, 0)
            if is_initialized(content):
                with suppress(MesetaError):  # The rank is writing it.
                    states[rank] = parse_record(content, f"of rank {rank}")
        return states

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._files:
            os.close(descriptor)


def load_time_limits(run_dir: Path) -> TimeLimits:
    """Return the time limits from the config of a run, or the default limits if the config cannot be read."""
    from meseta.config import load_config

    # The ranks report a config that cannot be read.
    try:
        return load_config(run_dir / "config.yaml", is_stored=True).comm.time_limits
    except (MesetaError, OSError):
        return TimeLimits()
