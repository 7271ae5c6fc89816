"""Who trains on rows of these readers, and for how much of its time it waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meseta.data.read.served.messages import LeaseRequest, Session, SessionStatus
from meseta.readers.rates import RATE_WINDOW_S, CounterHistory
from meseta.readers.window_store import evict_oldest

SESSION_TIMEOUT_S = 20.0
"""A rank that has asked for nothing for so long reads no more."""
TRAIN_SPLIT = "train"
"""The split that trainings read."""
MAX_SESSIONS = 65_536
"""Ranks that are known, at most."""


@dataclass
class _SessionRank:
    session: Session
    last_request_s: float = 0.0
    wait_counters: CounterHistory = field(default_factory=CounterHistory)
    """Seconds that it has waited, and that have passed."""

    @property
    def waiting_share(self) -> float:
        waited_s, passed_s = self.wait_counters.recent_increase()
        return min(waited_s / passed_s, 1.0) if passed_s else 0.0

    @property
    def has_full_window(self) -> bool:
        """Whether it has told of RATE_WINDOW_S and more."""
        return self.wait_counters.recent_increase()[1] >= RATE_WINDOW_S


class Sessions:
    """Ranks that read. Whoever shares it between threads sees to a lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ranks: dict[tuple[str, str, str, int], _SessionRank] = {}

    def record_request(self, request: LeaseRequest) -> None:
        """A rank has asked for windows, and told how it fares."""
        session, now_s = request.session, self._clock()
        key = (session.run, session.rows.dataset, session.rows.split, session.rank)
        rank = self._ranks.pop(key, None)
        if rank is None or rank.session.attempt != session.attempt:
            rank = _SessionRank(session)
        rank.session, rank.last_request_s = session, now_s
        rank.wait_counters.update(now_s, request.waited_s, request.passed_s)
        self._ranks[key] = rank
        evict_oldest(self._ranks, MAX_SESSIONS)

    def training_waiting_shares(self) -> list[float]:
        """Of every run and dataset whose split train is read: the share of the rank that waits most, for which the
        others wait. Evaluations, which do nothing but read, do not count."""
        shares: dict[tuple[str, str], float] = {}
        for (run, dataset, split, _), rank in self._active_ranks().items():
            if split == TRAIN_SPLIT and rank.has_full_window:
                shares[run, dataset] = max(shares.get((run, dataset), 0.0), rank.waiting_share)
        return list(shares.values())

    def _active_ranks(self) -> dict[tuple[str, str, str, int], _SessionRank]:
        now_s = self._clock()
        self._ranks = {
            key: rank for key, rank in self._ranks.items() if now_s - rank.last_request_s <= SESSION_TIMEOUT_S
        }
        return self._ranks

    def status(self) -> list[SessionStatus]:
        """Of every run and split that is read now."""
        found: dict[tuple[str, str, str], dict[int, _SessionRank]] = {}
        for (*reading, number), rank in sorted(self._active_ranks().items()):
            run, dataset, split = reading
            found.setdefault((run, dataset, split), {})[number] = rank
        return [
            SessionStatus(
                run=run,
                dataset=dataset,
                split=split,
                num_ranks=max(rank.session.num_ranks for rank in ranks.values()),
                waiting_shares={str(number): rank.waiting_share for number, rank in ranks.items()},
            )
            for (run, dataset, split), ranks in found.items()
        ]
