"""Who reads which window. Nothing of it has to be right for rows to be: any reader answers any ticket with the same
bytes, so a table that is lost, or that two ranks saw differently, costs work and no row."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from meseta.data.read.served.messages import (
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
from meseta.readers.rates import CounterHistory
from meseta.readers.sessions import Sessions
from meseta.readers.window_store import evict_oldest
from meseta.spec import MesetaError

HEARTBEAT_TIMEOUT_S = 5.0
"""A reader that has been silent for so long is taken to be gone."""
READER_BACKOFF_S = 10.0
"""A reader at which a rank met trouble is given nothing more of that run for so long, where there is another."""
NUM_RETAINED_WINDOWS = 64
"""Windows before the one that is asked for whose leases are kept, for ranks that come later."""
MAX_RUNS = 1024
"""Attempts, and orders of rows, that are remembered."""
MAX_LEASES = 2048
"""Windows of an order that are remembered: those that were leased last."""
MAX_READERS = 4096
"""That are known at a time."""


@dataclass(frozen=True)
class _EpochKey:
    """Whose windows they are."""

    run: str
    attempt: int
    rows: RowOrder
    epoch: int


@dataclass
class ReaderState:
    """What is known of a reader."""

    heartbeat: Heartbeat
    heartbeat_s: float
    backoff_until_s: dict[str, float] = field(default_factory=dict)
    """By run."""
    last_lease_number: int = -1
    """When it was given a window, counted over all windows."""
    counters: CounterHistory = field(default_factory=CounterHistory)
    """Of rows decoded, and of seconds in which it decoded."""


class LeaseTable:
    """Readers that are there, and their windows. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lease_numbers = count()
        self._readers: dict[str, ReaderState] = {}
        self._attempts: dict[str, int] = {}
        self._leases: dict[_EpochKey, dict[int, str]] = {}
        self._sessions = Sessions(clock)
        self.num_reassigned = Counter[MoveReason]()
        """Windows that went to another reader, by why."""

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """A reader is there. Raises MesetaError where there are too many."""
        with self._lock:
            if beat.reader not in self._readers and len(self._live_readers()) >= MAX_READERS:
                raise MesetaError(f"there are {MAX_READERS:,} readers, the most that a dispatcher knows; start another")
            reader = self._readers.setdefault(beat.reader, ReaderState(beat, 0.0))
            reader.heartbeat, reader.heartbeat_s = beat, self._clock()
            reader.counters.update(reader.heartbeat_s, beat.num_rows, beat.busy_s)

    def readers(self) -> list[ReaderStatus]:
        """Those that are there, by URL."""
        with self._lock:
            held = Counter(url for leases in self._leases.values() for url in leases.values())
            return [_status(self._readers[url], held[url]) for url in self._live_readers()]

    def sessions(self) -> list[SessionStatus]:
        """Who reads, and how much of the time it waits."""
        with self._lock:
            return self._sessions.status()

    def training_waiting_shares(self) -> list[float]:
        """Of the last RATE_WINDOW_S, for which trainings have waited for batches; of those that are known for so
        long."""
        with self._lock:
            return self._sessions.training_waiting_shares()

    def lease(self, request: LeaseRequest) -> Leases:
        """Give windows to readers; the same answer to every rank, while that reader is there and nobody has trouble
        with it. Raises MesetaError for a rank of a former attempt."""
        with self._lock:
            self._check_attempt(request.session)
            self._sessions.record_request(request)
            at_work = self._live_readers()
            leases = self._get_leases(request)
            for trouble in request.troubles:
                if leases.get(trouble.window) == trouble.reader:
                    why: MoveReason = "slow" if trouble.kind == "slow" else "lost"
                    self._revoke(request.session.run, leases, trouble.window, why)
            answer, turn = [], self._readers_in_turn(request.session.run, at_work)
            for window in request.windows:
                if leases.get(window) not in self._readers:
                    if window in leases:
                        self.num_reassigned["silent"] += 1
                    if not turn:
                        continue
                    leases[window] = turn[0]
                    self._readers[turn[0]].last_lease_number = next(self._lease_numbers)
                    turn.rotate(-1)
                answer.append(WindowLease(window=window, reader=leases[window]))
            evict_oldest(leases, MAX_LEASES)
            return Leases(leases=tuple(answer), num_readers=len(self._accepting_readers(at_work)))

    def _live_readers(self) -> list[str]:
        now_s = self._clock()
        for url in [url for url, reader in self._readers.items() if now_s - reader.heartbeat_s > HEARTBEAT_TIMEOUT_S]:
            del self._readers[url]
        return sorted(self._readers)

    def _check_attempt(self, session: Session) -> None:
        newest = self._attempts.pop(session.run, session.attempt)
        self._attempts[session.run] = max(newest, session.attempt)  # the last of them, which is forgotten last
        evict_oldest(self._attempts, MAX_RUNS)
        if session.attempt < newest:
            raise MesetaError(
                f"rank {session.rank} belongs to a former attempt at run {session.run!r}, which has been begun again; "
                "end what is left of it"
            )

    def _get_leases(self, request: LeaseRequest) -> dict[int, str]:
        session = request.session
        order = _EpochKey(session.run, session.attempt, session.rows, request.epoch)
        leases = self._leases.pop(order, {})
        first = min(request.windows, default=0) - NUM_RETAINED_WINDOWS
        self._leases[order] = leases = {window: url for window, url in leases.items() if window >= first}
        evict_oldest(self._leases, MAX_RUNS)
        return leases

    def _revoke(self, run: str, leases: dict[int, str], window: int, why: MoveReason) -> None:
        """Take a window, and those behind it, from its reader, where there is another."""
        url = leases[window]
        if url in self._readers:
            shunned = self._readers[url].backoff_until_s
            shunned[run] = self._clock() + READER_BACKOFF_S
            evict_oldest(shunned, MAX_RUNS)
        if url not in self._readers or self._accepting_readers(self._readers.keys() - {url}):
            del leases[window]
            self.num_reassigned[why] += 1

    def _readers_in_turn(self, run: str, at_work: list[str]) -> deque[str]:
        """Readers that stay, and that nobody of this run shuns if there are such, in the order in which they were given
        their last windows: whoever has just come is next, and does not have to catch up."""
        now_s, staying = self._clock(), self._accepting_readers(at_work)
        welcome = [url for url in staying if self._readers[url].backoff_until_s.get(run, now_s) <= now_s]
        return deque(sorted(welcome or staying, key=lambda url: self._readers[url].last_lease_number))

    def _accepting_readers(self, urls: Iterable[str]) -> list[str]:
        return [url for url in urls if not self._readers[url].heartbeat.is_leaving]


def _status(reader: ReaderState, num_leases: int) -> ReaderStatus:
    rows_per_s, busy_share = reader.counters.rates()
    return ReaderStatus(
        **reader.heartbeat.model_dump(), num_leases=num_leases, rows_per_s=rows_per_s, busy_share=min(busy_share, 1.0)
    )
