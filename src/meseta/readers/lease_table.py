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
    Beat,
    LeaseRequest,
    Leases,
    ReaderStatus,
    RowsAsked,
    Session,
    SessionStatus,
    WhyMoved,
    WindowLease,
)
from meseta.readers.rates import Growth
from meseta.readers.sessions import Sessions
from meseta.readers.window_store import forget_oldest
from meseta.spec import MesetaError

LOST_S = 5.0
"""A reader that has been silent for so long is taken to be gone."""
SHUN_S = 10.0
"""A reader at which a rank met trouble is given nothing more of that run for so long, where there is another."""
KEPT_WINDOWS = 64
"""Windows before the one that is asked for whose leases are kept, for ranks that come later."""
MOST_RUNS = 1024
"""Attempts, and orders of rows, that are remembered."""
MOST_LEASES = 2048
"""Windows of an order that are remembered: those that were leased last."""
MOST_READERS = 4096
"""That are known at a time."""


@dataclass(frozen=True)
class _Order:
    """Whose windows they are."""

    run: str
    attempt: int
    rows: RowsAsked
    epoch: int


@dataclass
class ReaderAtWork:
    """What is known of a reader."""

    beat: Beat
    heard_s: float
    shunned_until_s: dict[str, float] = field(default_factory=dict)
    """By run."""
    last_turn: int = -1
    """When it was given a window, counted over all windows."""
    growth: Growth = field(default_factory=Growth)
    """Of rows decoded, and of seconds in which it decoded."""


class LeaseTable:
    """Readers that are there, and their windows. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._turns = count()
        self._readers: dict[str, ReaderAtWork] = {}
        self._attempts: dict[str, int] = {}
        self._leases: dict[_Order, dict[int, str]] = {}
        self._sessions = Sessions(clock)
        self.num_moved = Counter[WhyMoved]()
        """Windows that went to another reader, by why."""

    def beat(self, beat: Beat) -> None:
        """A reader is there. Raises MesetaError where there are too many."""
        with self._lock:
            if beat.reader not in self._readers and len(self._at_work()) >= MOST_READERS:
                raise MesetaError(
                    f"there are {MOST_READERS:,} readers, the most that a dispatcher knows; start another"
                )
            reader = self._readers.setdefault(beat.reader, ReaderAtWork(beat, 0.0))
            reader.beat, reader.heard_s = beat, self._clock()
            reader.growth.tell(reader.heard_s, beat.num_rows, beat.busy_s)

    def readers(self) -> list[ReaderStatus]:
        """Those that are there, by URL."""
        with self._lock:
            held = Counter(url for leases in self._leases.values() for url in leases.values())
            return [_status(self._readers[url], held[url]) for url in self._at_work()]

    def sessions(self) -> list[SessionStatus]:
        """Who reads, and how much of the time it waits."""
        with self._lock:
            return self._sessions.status()

    def training_shares(self) -> list[float]:
        """Of the last RATE_S, for which trainings have waited for batches; of those that are known for so long."""
        with self._lock:
            return self._sessions.training_shares()

    def lease(self, request: LeaseRequest) -> Leases:
        """Give windows to readers; the same answer to every rank, while that reader is there and nobody has trouble
        with it. Raises MesetaError for a rank of a former attempt."""
        with self._lock:
            self._check_attempt(request.session)
            self._sessions.tell(request)
            at_work = self._at_work()
            leases = self._leases_of(request)
            for trouble in request.troubles:
                if leases.get(trouble.window) == trouble.reader:
                    why: WhyMoved = "slow" if trouble.kind == "slow" else "lost"
                    self._relieve(request.session.run, leases, trouble.window, why)
            answer, turn = [], self._turn(request.session.run, at_work)
            for window in request.windows:
                if leases.get(window) not in self._readers:
                    if window in leases:
                        self.num_moved["silent"] += 1
                    if not turn:
                        continue
                    leases[window] = turn[0]
                    self._readers[turn[0]].last_turn = next(self._turns)
                    turn.rotate(-1)
                answer.append(WindowLease(window=window, reader=leases[window]))
            forget_oldest(leases, MOST_LEASES)
            return Leases(leases=tuple(answer), num_readers=len(self._staying(at_work)))

    def _at_work(self) -> list[str]:
        now_s = self._clock()
        for url in [url for url, reader in self._readers.items() if now_s - reader.heard_s > LOST_S]:
            del self._readers[url]
        return sorted(self._readers)

    def _check_attempt(self, session: Session) -> None:
        newest = self._attempts.pop(session.run, session.attempt)
        self._attempts[session.run] = max(newest, session.attempt)  # the last of them, which is forgotten last
        forget_oldest(self._attempts, MOST_RUNS)
        if session.attempt < newest:
            raise MesetaError(
                f"rank {session.rank} belongs to a former attempt at run {session.run!r}, which has been begun again; "
                "end what is left of it"
            )

    def _leases_of(self, request: LeaseRequest) -> dict[int, str]:
        session = request.session
        order = _Order(session.run, session.attempt, session.rows, request.epoch)
        leases = self._leases.pop(order, {})
        first = min(request.windows, default=0) - KEPT_WINDOWS
        self._leases[order] = leases = {window: url for window, url in leases.items() if window >= first}
        forget_oldest(self._leases, MOST_RUNS)
        return leases

    def _relieve(self, run: str, leases: dict[int, str], window: int, why: WhyMoved) -> None:
        """Take a window, and those behind it, from its reader, where there is another."""
        url = leases[window]
        if url in self._readers:
            shunned = self._readers[url].shunned_until_s
            shunned[run] = self._clock() + SHUN_S
            forget_oldest(shunned, MOST_RUNS)
        if url not in self._readers or self._staying(self._readers.keys() - {url}):
            del leases[window]
            self.num_moved[why] += 1

    def _turn(self, run: str, at_work: list[str]) -> deque[str]:
        """Readers that stay, and that nobody of this run shuns if there are such, in the order in which they were given
        their last windows: whoever has just come is next, and does not have to catch up."""
        now_s, staying = self._clock(), self._staying(at_work)
        welcome = [url for url in staying if self._readers[url].shunned_until_s.get(run, now_s) <= now_s]
        return deque(sorted(welcome or staying, key=lambda url: self._readers[url].last_turn))

    def _staying(self, urls: Iterable[str]) -> list[str]:
        return [url for url in urls if not self._readers[url].beat.is_leaving]


def _status(reader: ReaderAtWork, num_leases: int) -> ReaderStatus:
    rows_per_s, busy_share = reader.growth.per_second()
    return ReaderStatus(
        **reader.beat.model_dump(), num_leases=num_leases, rows_per_s=rows_per_s, busy_share=min(busy_share, 1.0)
    )
