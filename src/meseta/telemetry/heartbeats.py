"""Time since the last heartbeat of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# After a longer pause the monitor itself did not run, for example because of Ctrl-Z.
MAX_PAUSE_S = 3.0
"""Maximum seconds between polls that count as time without a heartbeat."""


class HeartbeatMonitor:
    """Monitor of rank heartbeats, which is polled about once per second. All times are seconds on one local clock."""

    def __init__(self, ranks: Iterable[int], now_s: float) -> None:
        self._polled_s = now_s
        self._last_heartbeat_s = dict.fromkeys(ranks, now_s)
        self._heartbeats = dict.fromkeys(self._last_heartbeat_s, 0)

    def update(self, beats: Mapping[int, int], now_s: float) -> dict[int, float]:
        """Update the heartbeats, and return the seconds since the last heartbeat of each rank.

        `beats` maps ranks to their current heartbeat values. A rank without an entry has sent none.
        """
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        for rank in self._last_heartbeat_s:
            beat = beats.get(rank, 0)
            if beat != self._heartbeats[rank]:
                self._heartbeats[rank], self._last_heartbeat_s[rank] = beat, now_s
            elif passed_s > MAX_PAUSE_S:
                self._last_heartbeat_s[rank] += passed_s
        return {rank: now_s - heard_s for rank, heard_s in self._last_heartbeat_s.items()}

    def has_heartbeat(self, rank: int) -> bool:
        """Whether the rank has sent a heartbeat."""
        return self._heartbeats[rank] != 0
