"""Autoscaling of readers by the waiting time of trainers and the utilization of readers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from meseta.data.service.server.lease_table import LeaseTable
from meseta.data.service.server.local_readers import LocalReaders
from meseta.data.service.server.rates import RATE_WINDOW_S
from meseta.spec import MesetaError

MAX_WAITING_SHARE = 0.02
"""Share of time for which training may wait for batches."""
MAX_EXCESS_WAIT_S = 1.0
"""Waiting time above `MAX_WAITING_SHARE` that triggers a scale-up, accumulated since the number of readers changed."""
MIN_CHECKED_SHARE = 0.1
"""Waiting share from which the gain of the previous scale-up is checked."""
MIN_GAIN_SHARE = 0.15
"""Minimum gain of a scale-up as a share of linear scaling. Two scale-ups below it in a row are reverted."""
SETTLE_DELAY_S = 4.0
"""Seconds until a new reader has its full effect, in addition to the time of two windows."""
SCALE_DOWN_DELAY_S = 60.0
"""Seconds for which fewer readers must have been sufficient before a scale-down."""
SCALING_COOLDOWN_S = 300.0
"""Seconds without scale-ups after a revert. After the same time without a change, `MAX_BUSY_SHARE` does not apply."""
MAX_BUSY_SHARE = 0.85
"""Maximum utilization of the remaining readers after a scale-down."""
HEADROOM_READERS = 0.15
"""Spare capacity that must remain, in units of one reader."""
INSUFFICIENT_BACKOFF_S = 1800.0
"""Seconds for which an insufficient number of readers is not tried again, unless the load has dropped clearly."""
MAX_SCALE_UP_FACTOR = 8
"""Maximum factor by which one scale-up increases the number of readers."""


@dataclass(frozen=True, kw_only=True)
class ReaderLoad:
    """Load of readers and training runs over the last `RATE_WINDOW_S` seconds."""

    num_readers: int
    """Number of readers, without those that drain."""
    waiting_shares: Sequence[float]
    """Share of time for which each training run waits for batches. Runs without a full window are excluded."""
    busy_readers: float
    """Sum of the utilization of all readers. A reader is idle if all requested windows are decoded."""
    window_s: float = 0.0
    """Mean seconds to decode a window."""


@dataclass(frozen=True)
class _InsufficientCount:
    """Number of readers with which training waited, and the load at that time."""

    num_readers: int
    until_s: float
    busy_readers: float
    """Highest utilization seen, in units of one reader. Until `has_sufficient_load`, it is a lower bound, because the
    readers were saturated."""
    has_sufficient_load: bool = False
    """Whether `busy_readers` includes a measurement after the scale-up."""


@dataclass(frozen=True)
class _ScaleUp:
    """State before the last scale-up."""

    num_readers: int
    waiting_share: float
    reverts_to: int | None = None
    """Number of readers before the previous scale-up, if that had no gain either."""

    def has_gain(self, num_readers: int, waiting_share: float) -> bool:
        """Whether `num_readers` readers sped up training enough, or the gain cannot be judged.

        It cannot be judged if little waiting is left, or if training waits clearly more than before.
        """
        speed_before = 1.0 - self.waiting_share
        expected_gain = min(speed_before * num_readers / self.num_readers, 1.0) - speed_before
        is_inconclusive = not MIN_CHECKED_SHARE <= waiting_share <= self.waiting_share + HEADROOM_READERS
        return is_inconclusive or (1.0 - waiting_share) - speed_before >= MIN_GAIN_SHARE * expected_gain


class ReaderAutoscaler:
    """Controller of the target number of readers from successive measurements of the load. Only reads the clock."""

    # If training waits for a share w of its time while n readers are saturated, it needs n / (1 - w) readers. If it
    # does not wait, it needs the utilization of all readers together, plus some headroom. Several rules prevent
    # oscillation:
    #
    # - A decision uses only measurements with the current number of readers.
    # - A smaller number must have been sufficient for `SCALE_DOWN_DELAY_S`.
    # - A number that was insufficient is not tried again for `INSUFFICIENT_BACKOFF_S`.
    # - Two scale-ups without gain are reverted, because the bottleneck is elsewhere, such as a shared disk.

    def __init__(self, least: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with a target of `least` readers. Raises MesetaError unless 1 <= `least` <= `most`."""
        if not 1 <= least <= most:
            raise MesetaError(f"readers: --min must be at least 1 and at most --max, got {least} and {most}")
        self.min_readers, self.max_readers = least, most
        self.target_readers = least
        self._clock = clock
        self._history: deque[tuple[float, ReaderLoad]] = deque()
        """Time and load of each measurement with the current number of readers."""
        self._same_since_s = self._start_s = self._target_changed_s = clock()
        self._num_readers = 0
        self._excess_s = 0.0
        """Accumulated waiting time above `MAX_WAITING_SHARE`, at least 0."""
        self._excess_since_s = 0.0
        self._insufficient: _InsufficientCount | None = None
        self._last_scale_up: _ScaleUp | None = None
        self._cooldown_until_s = -math.inf

    def update(self, load: ReaderLoad) -> int:
        """Process a measurement and return the target number of readers. Call it about once per second."""
        now_s = self._clock()
        if load.num_readers != self._num_readers:
            self._history.clear()
            self._num_readers, self._same_since_s, self._excess_s = load.num_readers, now_s, 0.0
        settle_s = RATE_WINDOW_S + SETTLE_DELAY_S + 2.0 * load.window_s
        target = self.target_readers
        # A restarted dispatcher adopts the readers that are already running.
        if now_s - self._start_s < settle_s:
            target = min(max(target, load.num_readers), self.max_readers)
        elif load.num_readers and now_s - self._same_since_s >= settle_s:
            self._record(load, now_s)
            target = self._decide(now_s)
        if target != self.target_readers:
            self.target_readers, self._target_changed_s = target, now_s
        return target

    def _record(self, load: ReaderLoad, now_s: float) -> None:
        """Add a measurement to the history and to the accumulated waiting time."""
        previous = self._history[-1] if self._history else None
        if previous is None or not previous[1].waiting_shares:
            self._excess_since_s = now_s - RATE_WINDOW_S  # Start of the window of this measurement.
        elif self._excess_s == 0.0 and _max_waiting_share(previous[1]) < MAX_WAITING_SHARE:
            self._excess_since_s = now_s
        seconds = 0.0 if previous is None else now_s - previous[0]
        self._excess_s = max(self._excess_s + seconds * (_max_waiting_share(load) - MAX_WAITING_SHARE), 0.0)
        if not load.waiting_shares:
            self._excess_s = 0.0
        if previous is not None and self._excess_s == 0.0:
            # The readers were sufficient, so later waiting says nothing about the last scale-up.
            self._last_scale_up = None
        self._history.append((now_s, load))
        while self._history[0][0] < now_s - SCALE_DOWN_DELAY_S:
            self._history.popleft()

    def _decide(self, now_s: float) -> int:
        num_readers = self._num_readers
        loads = [load for _, load in self._history]
        waiting_s = now_s - self._excess_since_s
        # Readers that are still starting come before a further scale-up.
        if self._excess_s >= MAX_EXCESS_WAIT_S and waiting_s >= RATE_WINDOW_S and num_readers >= self.target_readers:
            return self._scale_up_target(now_s)
        is_calm = (
            now_s - self._history[0][0] >= SCALE_DOWN_DELAY_S - 1.0
            and fmean(map(_max_waiting_share, loads)) < MAX_WAITING_SHARE
        )
        return self._scale_down_target(self._peak_load(now_s), num_readers, now_s) if is_calm else self.target_readers

    def _peak_load(self, now_s: float) -> float:
        """Return the highest mean utilization in a third of `SCALE_DOWN_DELAY_S`, in units of one reader."""
        thirds: dict[int, list[float]] = {}
        for recorded_s, load in self._history:
            thirds.setdefault(int(3 * (now_s - recorded_s) / SCALE_DOWN_DELAY_S), []).append(load.busy_readers)
        return max(map(fmean, thirds.values()))

    def _scale_up_target(self, now_s: float) -> int:
        """Return the target for runs that wait, or revert scale-ups without gain."""
        num_readers = self._num_readers
        loads = [
            load
            for recorded_s, load in self._history
            if recorded_s >= self._excess_since_s + RATE_WINDOW_S and load.waiting_shares
        ]
        share = min(fmean(fmean(load.waiting_shares) for load in loads), 0.99)
        reverts_to = None
        if self._last_scale_up is not None and not self._last_scale_up.has_gain(num_readers, share):
            if (target := self._last_scale_up.reverts_to) is not None or num_readers >= self.max_readers:
                self._cooldown_until_s = now_s + SCALING_COOLDOWN_S
                target, self._last_scale_up = target or self._last_scale_up.num_readers, None
                return target
            reverts_to = self._last_scale_up.num_readers  # A single scale-up may lack gain by chance.
        if now_s < self._cooldown_until_s:
            return self.target_readers
        needed = math.ceil(num_readers / (1.0 - share) + HEADROOM_READERS)
        target_readers = max(
            self.target_readers, min(max(num_readers + 1, needed), MAX_SCALE_UP_FACTOR * num_readers, self.max_readers)
        )
        if target_readers > num_readers:
            self._insufficient = _InsufficientCount(num_readers, now_s + INSUFFICIENT_BACKOFF_S, self._peak_load(now_s))
            self._last_scale_up = _ScaleUp(num_readers, share, reverts_to)
        return target_readers

    def _scale_down_target(self, busy_readers: float, num_readers: int, now_s: float) -> int:
        """Return the smallest sufficient number of readers, if it is below the current one."""
        is_patient = now_s - self._target_changed_s >= SCALING_COOLDOWN_S
        enough = math.ceil(busy_readers / (1.0 if is_patient else MAX_BUSY_SHARE) + HEADROOM_READERS)
        insufficient = self._insufficient
        # This measurement has more readers than the insufficient number, so that the load is known better.
        if insufficient is not None and not insufficient.has_sufficient_load:
            busiest = max(busy_readers, insufficient.busy_readers)
            insufficient = self._insufficient = replace(insufficient, busy_readers=busiest, has_sufficient_load=True)
        if insufficient is not None and enough <= insufficient.num_readers:
            # The insufficient number is tried again if the load has dropped, or after a while.
            is_less = busy_readers <= min(0.8 * insufficient.busy_readers, insufficient.busy_readers - HEADROOM_READERS)
            if is_less or now_s >= insufficient.until_s:
                self._insufficient = None
            else:
                enough = insufficient.num_readers + 1
        enough = max(enough, self.min_readers)
        return min(self.target_readers, enough) if enough < num_readers else self.target_readers


def _max_waiting_share(load: ReaderLoad) -> float:
    """Return the waiting share of the run that waits most."""
    return max(load.waiting_shares, default=0.0)


POLL_INTERVAL_S = 1.0


@contextmanager
def run_autoscaler(scale: ReaderAutoscaler, leases: LeaseTable, readers: LocalReaders | None) -> Iterator[None]:
    """Context manager that updates `scale` every `POLL_INTERVAL_S` seconds.

    Scales `readers` to the target, and stops them on exit. `None` means that another system starts and stops readers.
    """
    should_stop = threading.Event()

    def update() -> None:
        while not should_stop.is_set():
            target = scale.update(measure_load(leases))
            if readers is not None:
                readers.scale_to(target)
            should_stop.wait(POLL_INTERVAL_S)

    thread = threading.Thread(target=update, name="meseta-scale", daemon=True)
    thread.start()
    try:
        yield
    finally:
        should_stop.set()
        thread.join()
        if readers is not None:
            readers.stop()


def measure_load(leases: LeaseTable) -> ReaderLoad:
    """Return the recent load of readers and training runs."""
    readers = [reader for reader in leases.readers() if not reader.is_draining]
    num_windows = sum(reader.num_windows for reader in readers)
    return ReaderLoad(
        num_readers=len(readers),
        waiting_shares=leases.training_waiting_shares(),
        busy_readers=sum(reader.busy_share for reader in readers),
        window_s=sum(reader.busy_s for reader in readers) / num_windows if num_windows else 0.0,
    )
