"""How many readers there should be, by how long trainers wait and by how much readers have to do."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from meseta.readers.rates import RATE_WINDOW_S
from meseta.spec import MesetaError

MAX_WAITING_SHARE = 0.02
"""Of its time that training may wait for batches."""
MAX_EXCESS_WAIT_S = 1.0
"""So much more waiting than that, since the readers are what they are, calls for more of them."""
MIN_CHECKED_SHARE = 0.1
"""Where more readers have left so much waiting, it is looked at whether they have brought anything."""
MIN_GAIN_SHARE = 0.15
"""Of what they should have brought: less than that twice, and they go again, for PATIENCE_S."""
SETTLE_DELAY_S = 4.0
"""What a reader that has come needs before it has made its share; at least as long as it takes for a window."""
SCALE_DOWN_DELAY_S = 60.0
"""How long fewer readers must have been enough before some go."""
SCALING_COOLDOWN_S = 300.0
"""The same since the last change, where those that stay would have next to no time left."""
MAX_BUSY_SHARE = 0.85
"""Of their time that readers have something to do who have time left."""
HEADROOM_READERS = 0.15
"""Readers' worth of time that must be left in any case."""
INSUFFICIENT_BACKOFF_S = 1800.0
"""For how long a number that was too small is not tried again, unless there is clearly less to do."""
MAX_SCALE_UP_FACTOR = 8
"""So many times the readers that there are, at most, at once."""


@dataclass(frozen=True, kw_only=True)
class ReaderLoad:
    """What is seen of readers and training, over the last RATE_WINDOW_S."""

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
class _InsufficientCount:
    num_readers: int
    until_s: float
    busy_readers: float
    """Without a break, so that with enough of them it is as much or more."""
    has_sufficient_load: bool = False
    """Whether it was looked at with more of them."""


@dataclass(frozen=True)
class _ScaleUp:
    """What was before the last time that readers were added."""

    num_readers: int
    waiting_share: float
    reverts_to: int | None = None
    """Readers before the time before that, if those that were added then brought nothing either."""

    def has_gain(self, there: int, waiting_share: float) -> bool:
        """Whether so many readers have brought training forward, or leave little to bring; where it waits for more than
        before, it is another matter."""
        before = 1.0 - self.waiting_share
        hoped = min(before * there / self.num_readers, 1.0) - before
        is_another = not MIN_CHECKED_SHARE <= waiting_share <= self.waiting_share + HEADROOM_READERS
        return is_another or (1.0 - waiting_share) - before >= MIN_GAIN_SHARE * hoped


class ReaderAutoscaler:
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
        self.min_readers, self.max_readers = least, most
        self.target_readers = least
        self._clock = clock
        self._history: deque[tuple[float, ReaderLoad]] = deque()
        """Since the number of readers is what it is."""
        self._same_since_s = self._start_s = self._target_changed_s = clock()
        self._num_readers = 0
        self._excess_s = 0.0
        """Waiting above MAX_WAITING_SHARE, added up; never less than none."""
        self._excess_since_s = 0.0
        self._insufficient: _InsufficientCount | None = None
        self._last_scale_up: _ScaleUp | None = None
        self._cooldown_until_s = -math.inf

    def update(self, load: ReaderLoad) -> int:
        """Take a look, about once a second; returns how many there should be."""
        now_s = self._clock()
        if load.num_readers != self._num_readers:
            self._history.clear()
            self._num_readers, self._same_since_s, self._excess_s = load.num_readers, now_s, 0.0
        settle_s = RATE_WINDOW_S + SETTLE_DELAY_S + 2.0 * load.window_s
        wanted = self.target_readers
        if now_s - self._start_s < settle_s:  # those that were there before this one began
            wanted = min(max(wanted, load.num_readers), self.max_readers)
        elif load.num_readers and now_s - self._same_since_s >= settle_s:
            self._record(load, now_s)
            wanted = self._decide(now_s)
        if wanted != self.target_readers:
            self.target_readers, self._target_changed_s = wanted, now_s
        return wanted

    def _record(self, load: ReaderLoad, now_s: float) -> None:
        """Keep what is of the present readers alone."""
        before = self._history[-1] if self._history else None
        if before is None or not before[1].waiting_shares:
            self._excess_since_s = now_s - RATE_WINDOW_S  # which this look is of
        elif self._excess_s == 0.0 and _max_waiting_share(before[1]) < MAX_WAITING_SHARE:
            self._excess_since_s = now_s
        seconds = 0.0 if before is None else now_s - before[0]
        self._excess_s = max(self._excess_s + seconds * (_max_waiting_share(load) - MAX_WAITING_SHARE), 0.0)
        if not load.waiting_shares:
            self._excess_s = 0.0
        if before is not None and self._excess_s == 0.0:
            self._last_scale_up = None  # they were enough for a while, so that what comes is another matter
        self._history.append((now_s, load))
        while self._history[0][0] < now_s - SCALE_DOWN_DELAY_S:
            self._history.popleft()

    def _decide(self, now_s: float) -> int:
        there = self._num_readers
        seen = [load for _, load in self._history]
        waiting_s = now_s - self._excess_since_s
        if self._excess_s >= MAX_EXCESS_WAIT_S and waiting_s >= RATE_WINDOW_S and there >= self.target_readers:
            return self._scale_up_target(now_s)
        is_calm = (
            now_s - self._history[0][0] >= SCALE_DOWN_DELAY_S - 1.0
            and fmean(map(_max_waiting_share, seen)) < MAX_WAITING_SHARE
        )
        return self._scale_down_target(self._peak_load(now_s), there, now_s) if is_calm else self.target_readers

    def _peak_load(self, now_s: float) -> float:
        """Readers' worth of work in that third of SCALE_DOWN_DELAY_S in which there was most."""
        thirds: dict[int, list[float]] = {}
        for seen_s, load in self._history:
            thirds.setdefault(int(3 * (now_s - seen_s) / SCALE_DOWN_DELAY_S), []).append(load.busy_readers)
        return max(map(fmean, thirds.values()))

    def _scale_up_target(self, now_s: float) -> int:
        """As many as would do for trainings that get alike; at least one more."""
        there = self._num_readers
        seen = [
            load
            for seen_s, load in self._history
            if seen_s >= self._excess_since_s + RATE_WINDOW_S and load.waiting_shares
        ]
        share = min(fmean(fmean(load.waiting_shares) for load in seen), 0.99)
        doubted = None
        if self._last_scale_up is not None and not self._last_scale_up.has_gain(there, share):
            if (back := self._last_scale_up.reverts_to) is not None or there >= self.max_readers:
                self._cooldown_until_s = now_s + SCALING_COOLDOWN_S
                back, self._last_scale_up = back or self._last_scale_up.num_readers, None
                return back
            doubted = self._last_scale_up.num_readers  # once may be by chance
        if now_s < self._cooldown_until_s:
            return self.target_readers
        needed = math.ceil(there / (1.0 - share) + HEADROOM_READERS)
        more = max(self.target_readers, min(max(there + 1, needed), MAX_SCALE_UP_FACTOR * there, self.max_readers))
        if more > there:
            self._insufficient = _InsufficientCount(there, now_s + INSUFFICIENT_BACKOFF_S, self._peak_load(now_s))
            self._last_scale_up = _ScaleUp(there, share, doubted)
        return more

    def _scale_down_target(self, busy_readers: float, there: int, now_s: float) -> int:
        """As many as have enough time, where those are fewer."""
        is_patient = now_s - self._target_changed_s >= SCALING_COOLDOWN_S
        enough = math.ceil(busy_readers / (1.0 if is_patient else MAX_BUSY_SHARE) + HEADROOM_READERS)
        known = self._insufficient
        if known is not None and not known.has_sufficient_load:  # unless there is less to do by now
            busiest = max(busy_readers, known.busy_readers)
            known = self._insufficient = replace(known, busy_readers=busiest, has_sufficient_load=True)
        if known is not None and enough <= known.num_readers:
            is_less = busy_readers <= min(0.8 * known.busy_readers, known.busy_readers - HEADROOM_READERS)
            if is_less or now_s >= known.until_s:
                self._insufficient = None
            else:
                enough = known.num_readers + 1
        enough = max(enough, self.min_readers)
        return min(self.target_readers, enough) if enough < there else self.target_readers


def _max_waiting_share(load: ReaderLoad) -> float:
    """The share of the training that waits most."""
    return max(load.waiting_shares, default=0.0)
