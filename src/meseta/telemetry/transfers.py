"""Measurements of transfers: a span for each collective, and sums by the transfer's name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from meseta.spec.transfer import STEP_TRANSFERS

FORMER_KEYS = {
    "num_times": "num_calls",
    "inside_bytes": "intra_host_bytes",
    "across_bytes": "inter_host_bytes",
    "waited_s": "wait_s",
}
"""Current name of each former key in metrics.jsonl and summary.json."""
NUM_RECENT_SPANS = 4096
"""Number of recent spans that are kept. Older spans only count in the sums."""


class TransferSpan(NamedTuple):
    """Collective of this rank, from its start to the use of the received data."""

    name: str
    """Name of the transfer, see meseta.spec.transfer."""
    step: int | None
    """Number of steps completed before the step in which the collective started. `None` between steps, for example in
    an evaluation."""
    num_peers: int
    intra_host_bytes: float
    """Bytes sent to ranks of the same host."""
    inter_host_bytes: float
    """Bytes sent to ranks of other hosts."""
    begin_s: float
    """Start time on the clock of time.perf_counter()."""
    done_s: float
    """Time at which the end was detected, at the latest in the wait for the collective."""
    wait_s: float
    """Seconds that this rank was blocked by the collective. On a GPU the stream waits, not the rank."""


@dataclass(frozen=True)
class TransferMeans:
    """Measurements of one transfer of a rank, per step or in total."""

    num_calls: float
    """Number of collectives."""
    intra_host_bytes: float
    """Bytes sent to ranks of the same host."""
    inter_host_bytes: float
    """Bytes sent to ranks of other hosts."""
    seconds: float
    """Seconds from the start of the transfer to the detection of its end."""
    wait_s: float
    """Seconds that the rank was blocked by the transfer."""

    def __add__(self, other: TransferMeans) -> TransferMeans:
        return TransferMeans(*map(add, vars(self).values(), vars(other).values()))

    def __truediv__(self, num_steps: int) -> TransferMeans:
        return TransferMeans(*(value / num_steps for value in vars(self).values()))


class TransferTimes:
    """Sums of bytes and seconds by transfer, since the last `pop_means` and in total. Only spans of steps count."""

    def __init__(self) -> None:
        self.recent_spans: deque[TransferSpan] = deque(maxlen=NUM_RECENT_SPANS)
        """Last spans, ordered by their end."""
        self.step: int | None = None
        """Number of steps completed before the current one. `None` between steps."""
        self._recording: list[TransferSpan] | None = None
        self._num_steps = 0
        self._sums: dict[str, TransferMeans] = {}
        self._lifetime_sums: dict[str, TransferMeans] = {}
        self._num_reported_steps = 0

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """Context manager around a step. A step that raises is not counted."""
        self.step = self._num_steps
        try:
            yield
            self._num_steps += 1
        finally:
            self.step = None

    def add(self, span: TransferSpan) -> None:
        self.recent_spans.append(span)
        if self._recording is not None:
            self._recording.append(span)
        if span.step is not None:
            seconds = span.done_s - span.begin_s
            one = TransferMeans(1, span.intra_host_bytes, span.inter_host_bytes, seconds, span.wait_s)
            _add_to_sums(self._sums, span.name, one)

    def start_recording(self) -> None:
        self._recording = []

    def stop_recording(self) -> list[TransferSpan]:
        """Stop recording and return the recorded spans, ordered by their end."""
        spans, self._recording = self._recording or [], None
        return spans

    def pop_means(self) -> dict[str, TransferMeans]:
        """Return the means per step of each transfer since the last call."""
        num_steps, self._num_reported_steps = self._num_steps - self._num_reported_steps, self._num_steps
        sums, self._sums = self._sums, {}
        for name, one in sums.items():
            _add_to_sums(self._lifetime_sums, name, one)
        return _per_step(sums, num_steps)

    def lifetime_means(self) -> dict[str, TransferMeans]:
        """Return the means per step of each transfer, over all steps that `pop_means` has returned."""
        return _per_step(self._lifetime_sums, self._num_reported_steps)


def _add_to_sums(sums: dict[str, TransferMeans], name: str, one: TransferMeans) -> None:
    sums[name] = sums[name] + one if name in sums else one


def _per_step(sums: dict[str, TransferMeans], num_steps: int) -> dict[str, TransferMeans]:
    return {name: one / max(num_steps, 1) for name, one in sums.items() if name in STEP_TRANSFERS}
