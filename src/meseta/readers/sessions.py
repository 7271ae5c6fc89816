"""Sessions of the ranks that read, and the share of time for which they wait for batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meseta.data.read.served.messages import LeaseRequest, Session, SessionStatus
from meseta.readers.rates import RATE_WINDOW_S, CounterHistory
from meseta.readers.window_store import evict_oldest

SESSION_TIMEOUT_S = 20.0
"""Seconds without a request after which a rank's session expires."""
TRAIN_SPLIT = "train"
"""Split that training runs read."""
MAX_SESSIONS = 65_536
"""Maximum number of ranks with sessions."""


@dataclass
class _SessionRank:
    session: Session
    last_request_s: float = 0.0
    wait_counters: CounterHistory = field(default_factory=CounterHistory)
    """History of the seconds that the rank has waited, and of the elapsed seconds."""

    @property
    def waiting_share(self) -> float:
        waited_s, elapsed_s = self.wait_counters.recent_increase()
        return min(waited_s / elapsed_s, 1.0) if elapsed_s else 0.0

    @property
    def has_full_window(self) -> bool:
        """Whether the reports span at least `RATE_WINDOW_S` seconds."""
        return self.wait_counters.recent_increase()[1] >= RATE_WINDOW_S


class Sessions:
    """Sessions of ranks. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ranks: dict[tuple[str, str, str, int], _SessionRank] = {}

    def record_request(self, request: LeaseRequest) -> None:
        """Record a request of a rank, with its waiting time."""
        session, now_s = request.session, self._clock()
        key = (session.run, session.rows.dataset, session.rows.split, session.rank)
        rank = self._ranks.pop(key, None)
        if rank is None or rank.session.attempt != session.attempt:
            rank = _SessionRank(session)
        rank.session, rank.last_request_s = session, now_s
        rank.wait_counters.update(now_s, request.wait_s, request.elapsed_s)
        self._ranks[key] = rank
        evict_oldest(self._ranks, MAX_SESSIONS)

    def training_waiting_shares(self) -> list[float]:
        """Return the waiting share of each training run and dataset, which is the maximum over its ranks.

        Ranks without a full window are excluded.
        """
        # The slowest rank delays the others. Evaluations always wait, because they only read.
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
        """Return the status of each run and split with active ranks."""
        ranks_by_session: dict[tuple[str, str, str], dict[int, _SessionRank]] = {}
        for (*reading, number), rank in sorted(self._active_ranks().items()):
            run, dataset, split = reading
            ranks_by_session.setdefault((run, dataset, split), {})[number] = rank
        return [
            SessionStatus(
                run=run,
                dataset=dataset,
                split=split,
                num_ranks=max(rank.session.num_ranks for rank in ranks.values()),
                waiting_shares={str(number): rank.waiting_share for number, rank in ranks.items()},
            )
            for (run, dataset, split), ranks in ranks_by_session.items()
        ]
