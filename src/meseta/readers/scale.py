"""How many readers there should be, by how long trainers wait and by how much readers have to do."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from meseta.readers.rates import RATE_S
from meseta.spec import MesetaError

WAITING_SHARE = 0.02
"""Of its time that training may wait for batches."""
EXCESS_S = 1.0
"""So much more waiting than that, since the readers are what they are, calls for more of them."""
MUCH_SHARE = 0.1
"""Where more readers have left so much waiting, it is looked at whether they have brought anything."""
WORTH = 0.15
"""Of what they should have brought: less than that twice, and they go again, for PATIENCE_S."""
SETTLE_S = 4.0
"""What a reader that has come needs before it has made its share; at least as long as it takes for a window."""
CALM_S = 60.0
"""How long fewer readers must have been enough before some go."""
PATIENCE_S = 300.0
"""The same since the last change, where those that stay would have next to no time left."""
FULL_SHARE = 0.85
"""Of their time that readers have something to do who have time left."""
MARGIN = 0.15
"""Readers' worth of time that must be left in any case."""
REMEMBER_S = 1800.0
"""For how long a number that was too small is not tried again, unless there is clearly less to do."""
MOST_GROWTH = 8
"""So many times the readers that there are, at most, at once."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is seen of readers and training, over the last RATE_S."""

    num_readers: int
    """At work, without those that leave."""
    waiting_shares: Sequence[float]
    """Of the time of each training, in which it waits for batches; of those that are known for so long."""
    busy_readers: float
    """Readers' worth of decoding: the sum of the shares of their time in which they decode. In the rest of it all that
    they were asked for lies ready in their buffers."""
    window_s: float = 0.0
    """That a reader takes for a window."""


@dataclass(frozen=True)
class _TooFew:
    num_readers: int
    until_s: float
    busy_readers: float
    """Without a break, so that with enough of them it is as much or more."""
    with_enough: bool = False
    """Whether it was looked at with more of them."""


@dataclass(frozen=True)
class _Grown:
    """What was before the last time that readers were added."""

    num_readers: int
    waiting_share: float
    doubted: int | None = None
    """Readers before the time before that, if those that were added then brought nothing either."""

    def is_worth_it(self, there: int, waiting_share: float) -> bool:
        """Whether so many readers have brought training forward, or leave little to bring; where it waits for more than
        before, it is another matter."""
        before = 1.0 - self.waiting_share
        hoped = min(before * there / self.num_readers, 1.0) - before
        is_another = not MUCH_SHARE <= waiting_share <= self.waiting_share + MARGIN
        return is_another or (1.0 - waiting_share) - before >= WORTH * hoped


class ReaderScale:
    """The number of readers wanted, from one look to the next; pure but for its clock.

    Training that waits for a share w of its time while n readers decode without a break would take n / (1 - w) readers'
    worth, and that many are asked for. Where it does not wait, readers decode for b readers' worth of their time, and
    so many, with some margin, are kept. Nothing is decided before what is seen is of the present number of readers
    alone, fewer ones have to have been enough for a minute, and what was too few is remembered: so it does not swing.
    Readers that were added twice and brought nothing go again: something else limits, such as a disk that all read.
    """

    def __init__(self, least: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises MesetaError unless 1 <= least <= most."""
        if not 1 <= least <= most:
            raise MesetaError(f"readers: --min must be at least 1 and at most --max, got {least} and {most}")
        self.least, self.most = least, most
        self.wanted = least
        self._clock = clock
        self._seen: deque[tuple[float, Load]] = deque()
        """Since the number of readers is what it is."""
        self._same_since_s = self._began_s = self._changed_s = clock()
        self._there = 0
        self._excess_s = 0.0
        """Waiting above WAITING_SHARE, added up; never less than none."""
        self._excess_since_s = 0.0
        self._too_few: _TooFew | None = None
        self._grown: _Grown | None = None
        self._no_use_until_s = -math.inf

    def update(self, load: Load) -> int:
        """Take a look, about once a second; returns how many there should be."""
        now_s = self._clock()
        if load.num_readers != self._there:
            self._seen.clear()
            self._there, self._same_since_s, self._excess_s = load.num_readers, now_s, 0.0
        settle_s = RATE_S + SETTLE_S + 2.0 * load.window_s
        wanted = self.wanted
        if now_s - self._began_s < settle_s:  # those that were there before this one began
            wanted = min(max(wanted, load.num_readers), self.most)
        elif load.num_readers and now_s - self._same_since_s >= settle_s:
            self._see(load, now_s)
            wanted = self._decide(now_s)
        if wanted != self.wanted:
            self.wanted, self._changed_s = wanted, now_s
        return wanted

    def _see(self, load: Load, now_s: float) -> None:
        """Keep what is of the present readers alone."""
        before = self._seen[-1] if self._seen else None
        if before is None or not before[1].waiting_shares:
            self._excess_since_s = now_s - RATE_S  # which this look is of
        elif self._excess_s == 0.0 and _waiting(before[1]) < WAITING_SHARE:
            self._excess_since_s = now_s
        seconds = 0.0 if before is None else now_s - before[0]
        self._excess_s = max(self._excess_s + seconds * (_waiting(load) - WAITING_SHARE), 0.0)
        if not load.waiting_shares:
            self._excess_s = 0.0
        if before is not None and self._excess_s == 0.0:
            self._grown = None  # they were enough for a while, so that what comes is another matter
        self._seen.append((now_s, load))
        while self._seen[0][0] < now_s - CALM_S:
            self._seen.popleft()

    def _decide(self, now_s: float) -> int:
        there = self._there
        seen = [load for _, load in self._seen]
        waiting_s = now_s - self._excess_since_s
        if self._excess_s >= EXCESS_S and waiting_s >= RATE_S and there >= self.wanted:
            return self._more(now_s)
        is_calm = now_s - self._seen[0][0] >= CALM_S - 1.0 and fmean(map(_waiting, seen)) < WAITING_SHARE
        return self._fewer(self._busiest(now_s), there, now_s) if is_calm else self.wanted

    def _busiest(self, now_s: float) -> float:
        """Readers' worth of work in that third of CALM_S in which there was most."""
        thirds: dict[int, list[float]] = {}
        for seen_s, load in self._seen:
            thirds.setdefault(int(3 * (now_s - seen_s) / CALM_S), []).append(load.busy_readers)
        return max(map(fmean, thirds.values()))

    def _more(self, now_s: float) -> int:
        """As many as would do for trainings that get alike; at least one more."""
        there = self._there
        seen = [load for seen_s, load in self._seen if seen_s >= self._excess_since_s + RATE_S and load.waiting_shares]
        share = min(fmean(fmean(load.waiting_shares) for load in seen), 0.99)
        doubted = None
        if self._grown is not None and not self._grown.is_worth_it(there, share):
            if (back := self._grown.doubted) is not None or there >= self.most:
                self._no_use_until_s = now_s + PATIENCE_S
                back, self._grown = back or self._grown.num_readers, None
                return back
            doubted = self._grown.num_readers  # once may be by chance
        if now_s < self._no_use_until_s:
            return self.wanted
        needed = math.ceil(there / (1.0 - share) + MARGIN)
        more = max(self.wanted, min(max(there + 1, needed), MOST_GROWTH * there, self.most))
        if more > there:
            self._too_few = _TooFew(there, now_s + REMEMBER_S, self._busiest(now_s))
            self._grown = _Grown(there, share, doubted)
        return more

    def _fewer(self, busy_readers: float, there: int, now_s: float) -> int:
        """As many as have enough time, where those are fewer."""
        is_patient = now_s - self._changed_s >= PATIENCE_S
        enough = math.ceil(busy_readers / (1.0 if is_patient else FULL_SHARE) + MARGIN)
        known = self._too_few
        if known is not None and not known.with_enough:  # unless there is less to do by now
            busiest = max(busy_readers, known.busy_readers)
            known = self._too_few = replace(known, busy_readers=busiest, with_enough=True)
        if known is not None and enough <= known.num_readers:
            is_less = busy_readers <= min(0.8 * known.busy_readers, known.busy_readers - MARGIN)
            if is_less or now_s >= known.until_s:
                self._too_few = None
            else:
                enough = known.num_readers + 1
        enough = max(enough, self.least)
        return min(self.wanted, enough) if enough < there else self.wanted


def _waiting(load: Load) -> float:
    """The share of the training that waits most."""
    return max(load.waiting_shares, default=0.0)
