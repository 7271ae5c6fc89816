"""Sessions of the ranks that read, and the share of time for which they wait for batches."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from meseta.data.service.messages import (
    Heartbeat,
    LeaseRequest,
    Leases,
    MoveReason,
    ReaderStatus,
    RowOrder,
    Session,
    SessionStatus,
    WindowLease,
)
from meseta.data.service.server.rates import RATE_WINDOW_S, CounterHistory
from meseta.data.service.server.window_store import evict_oldest
from meseta.spec import MesetaError

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
        """Return the waiting share of each training run and dataset: the maximum of its ranks with a full window."""
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


# Correctness does not depend on the table, because all readers return the same bytes for a ticket. If the table is
# lost, or ranks disagree about it, windows are decoded twice.

HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which a reader is unresponsive and loses its leases."""
READER_BACKOFF_S = 10.0
"""Seconds for which a failing reader receives no leases from the same run, provided another reader is available."""
NUM_RETAINED_WINDOWS = 64
"""Number of windows before the requested ones whose leases are kept for slower ranks."""
MAX_RUNS = 1024
"""Maximum number of runs in the table. The same limit applies to epochs."""
MAX_LEASES = 2048
"""Maximum number of leases per epoch. The oldest leases are dropped."""
MAX_READERS = 4096
"""Maximum number of readers with heartbeats."""


@dataclass(frozen=True)
class _EpochKey:
    """Identity of an epoch of one run."""

    run: str
    attempt: int
    rows: RowOrder
    epoch: int


@dataclass
class ReaderState:
    """State of a reader with heartbeats."""

    heartbeat: Heartbeat
    heartbeat_s: float
    backoff_until_s: dict[str, float] = field(default_factory=dict)
    """Time at which this reader's backoff ends, by run."""
    last_lease_number: int = -1
    """Number of the reader's last lease, counted over all readers. -1 before the first lease."""
    counters: CounterHistory = field(default_factory=CounterHistory)
    """History of the number of decoded rows and of the seconds of decoding."""


class LeaseTable:
    """Thread-safe table of readers and the windows leased to them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lease_numbers = count()
        self._readers: dict[str, ReaderState] = {}
        self._attempts: dict[str, int] = {}
        self._leases: dict[_EpochKey, dict[int, str]] = {}
        self._sessions = Sessions(clock)
        self.num_reassigned = Counter[MoveReason]()
        """Number of windows that moved to another reader, by reason."""

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Add or update a reader. Raises MesetaError if there are `MAX_READERS` other readers."""
        with self._lock:
            if heartbeat.reader not in self._readers and len(self._live_readers()) >= MAX_READERS:
                raise MesetaError(f"a dispatcher has at most {MAX_READERS:,} readers; start another dispatcher")
            reader = self._readers.setdefault(heartbeat.reader, ReaderState(heartbeat, 0.0))
            reader.heartbeat, reader.heartbeat_s = heartbeat, self._clock()
            reader.counters.update(reader.heartbeat_s, heartbeat.num_rows, heartbeat.busy_s)

    def readers(self) -> list[ReaderStatus]:
        """Return the status of each reader with heartbeats, sorted by URL."""
        with self._lock:
            num_leases = Counter(url for leases in self._leases.values() for url in leases.values())
            return [_status(self._readers[url], num_leases[url]) for url in self._live_readers()]

    def sessions(self) -> list[SessionStatus]:
        """Return the status of all sessions."""
        with self._lock:
            return self._sessions.status()

    def training_waiting_shares(self) -> list[float]:
        """Return the waiting share of each training run, see `Sessions.training_waiting_shares`."""
        with self._lock:
            return self._sessions.training_waiting_shares()

    def lease(self, request: LeaseRequest) -> Leases:
        """Assign the requested windows to readers. A window without an available reader is missing in the result.

        All ranks receive the same reader for a window, until that reader becomes unresponsive or a rank reports it.
        Raises MesetaError if the rank belongs to an earlier attempt of the run.
        """
        with self._lock:
            self._check_attempt(request.session)
            self._sessions.record_request(request)
            live_readers = self._live_readers()
            leases = self._get_leases(request)
            # Several ranks may report one failure. Only the first report revokes the lease.
            for failure in request.failures:
                if leases.get(failure.window) == failure.reader:
                    reason: MoveReason = "slow" if failure.kind == "slow" else "lost"
                    self._revoke(request.session.run, leases, failure.window, reason)
            granted, candidates = [], self._readers_in_turn(request.session.run, live_readers)
            for window in request.windows:
                if leases.get(window) not in self._readers:
                    if window in leases:
                        self.num_reassigned["silent"] += 1
                    if not candidates:
                        continue
                    leases[window] = candidates[0]
                    self._readers[candidates[0]].last_lease_number = next(self._lease_numbers)
                    candidates.rotate(-1)
                granted.append(WindowLease(window=window, reader=leases[window]))
            evict_oldest(leases, MAX_LEASES)
            return Leases(leases=tuple(granted), num_readers=len(self._accepting_readers(live_readers)))

    def _live_readers(self) -> list[str]:
        now_s = self._clock()
        for url in [url for url, reader in self._readers.items() if now_s - reader.heartbeat_s > HEARTBEAT_TIMEOUT_S]:
            del self._readers[url]
        return sorted(self._readers)

    def _check_attempt(self, session: Session) -> None:
        newest = self._attempts.pop(session.run, session.attempt)
        # Inserted again at the end, so that this run is dropped last.
        self._attempts[session.run] = max(newest, session.attempt)
        evict_oldest(self._attempts, MAX_RUNS)
        if session.attempt < newest:
            raise MesetaError(
                f"rank {session.rank} belongs to an earlier attempt of run {session.run!r}, which has been restarted; "
                "stop the processes of the earlier attempt"
            )

    def _get_leases(self, request: LeaseRequest) -> dict[int, str]:
        session = request.session
        key = _EpochKey(session.run, session.attempt, session.rows, request.epoch)
        leases = self._leases.pop(key, {})
        first = min(request.windows, default=0) - NUM_RETAINED_WINDOWS
        self._leases[key] = leases = {window: url for window, url in leases.items() if window >= first}
        evict_oldest(self._leases, MAX_RUNS)
        return leases

    def _revoke(self, run: str, leases: dict[int, str], window: int, why: MoveReason) -> None:
        """Start a backoff of the window's reader for this run. Revoke its lease if another reader is available."""
        url = leases[window]
        if url in self._readers:
            backoffs = self._readers[url].backoff_until_s
            backoffs[run] = self._clock() + READER_BACKOFF_S
            evict_oldest(backoffs, MAX_RUNS)
        if url not in self._readers or self._accepting_readers(self._readers.keys() - {url}):
            del leases[window]
            self.num_reassigned[why] += 1

    def _readers_in_turn(self, run: str, live_readers: list[str]) -> deque[str]:
        """Return the accepting readers, least recently leased first, without those in backoff if there are others."""
        # The order does not depend on the number of leases, so that a new reader need not catch up.
        now_s, accepting = self._clock(), self._accepting_readers(live_readers)
        preferred = [url for url in accepting if self._readers[url].backoff_until_s.get(run, now_s) <= now_s]
        return deque(sorted(preferred or accepting, key=lambda url: self._readers[url].last_lease_number))

    def _accepting_readers(self, urls: Iterable[str]) -> list[str]:
        return [url for url in urls if not self._readers[url].heartbeat.is_draining]


def _status(reader: ReaderState, num_leases: int) -> ReaderStatus:
    rows_per_s, busy_share = reader.counters.rates()
    return ReaderStatus(
        **reader.heartbeat.model_dump(), num_leases=num_leases, rows_per_s=rows_per_s, busy_share=min(busy_share, 1.0)
    )
