"""How long ago each rank was heard, by whoever listens to their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_PAUSE_S = 3.0
"""Looks further apart than this say that the listener itself did not run, as after Ctrl-Z: nobody is blamed for it."""


class HeartbeatMonitor:
    """Heartbeats of ranks, as a listener finds them about once a second. All times in seconds of its own clock."""

    def __init__(self, ranks: Iterable[int], now_s: float) -> None:
        self._polled_s = now_s
        self._last_heartbeat_s = dict.fromkeys(ranks, now_s)
        self._heartbeats = dict.fromkeys(self._last_heartbeat_s, 0)

    def update(self, beats: Mapping[int, int], now_s: float) -> dict[int, float]:
        """Take what the hearts say now, those of `beats` alone; returns for each rank how long it has been silent."""
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        for rank in self._last_heartbeat_s:
            beat = beats.get(rank, 0)
            if beat != self._heartbeats[rank]:
                self._heartbeats[rank], self._last_heartbeat_s[rank] = beat, now_s
            elif passed_s > MAX_PAUSE_S:
                self._last_heartbeat_s[rank] += passed_s
        return {rank: now_s - heard_s for rank, heard_s in self._last_heartbeat_s.items()}

    def has_heartbeat(self, rank: int) -> bool:
        """Whether a rank was ever heard."""
        return self._heartbeats[rank] != 0
