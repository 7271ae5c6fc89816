"""How long ago each rank was heard, by whoever listens to their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PAUSE_S = 3.0
"""Looks further apart than this say that the listener itself did not run, as after Ctrl-Z: nobody is blamed for it."""


class Hearts:
    """Heartbeats of ranks, as a listener finds them about once a second. All times in seconds of its own clock."""

    def __init__(self, ranks: Iterable[int], now_s: float) -> None:
        self._looked_s = now_s
        self._heard_s = dict.fromkeys(ranks, now_s)
        self._beats = dict.fromkeys(self._heard_s, 0)

    def listen(self, beats: Mapping[int, int], now_s: float) -> dict[int, float]:
        """Take what the hearts say now, those of `beats` alone; returns for each rank how long it has been silent."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        for rank in self._heard_s:
            beat = beats.get(rank, 0)
            if beat != self._beats[rank]:
                self._beats[rank], self._heard_s[rank] = beat, now_s
            elif passed_s > PAUSE_S:
                self._heard_s[rank] += passed_s
        return {rank: now_s - heard_s for rank, heard_s in self._heard_s.items()}

    def has_beaten(self, rank: int) -> bool:
        """Whether a rank was ever heard."""
        return self._beats[rank] != 0
