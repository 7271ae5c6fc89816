"""What travelled: a span for each collective, and their sums by the name of the transfer."""

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
"""Spans that are at hand; older ones are in the sums alone."""


class TransferSpan(NamedTuple):
    """One collective of this rank, from its beginning to the moment when what came in was used."""

    name: str
    """Of the transfer, see meseta.spec.transfer."""
    step: int | None
    """Steps that had ended before the one in which it began; None between steps, as in an evaluation."""
    num_peers: int
    """Other ranks that took part."""
    intra_host_bytes: float
    """Sent to ranks of the same host."""
    inter_host_bytes: float
    """Sent to ranks of other hosts."""
    begin_s: float
    """On the clock of time.perf_counter()."""
    done_s: float
    """When it was known to be done: at the latest when it was waited for."""
    wait_s: float
    """How long this rank stood still for it. On a GPU the stream waits, and the rank does not."""


@dataclass(frozen=True)
class TransferMeans:
    """What one rank had of one transfer, per step; or, over one step, in all."""

    num_calls: float
    intra_host_bytes: float
    """Sent to ranks of the same host."""
    inter_host_bytes: float
    """Sent to ranks of other hosts."""
    seconds: float
    """From the beginning to the moment when it was known to be done."""
    wait_s: float
    """How long the rank stood still for it."""

    def __add__(self, other: TransferMeans) -> TransferMeans:
        return TransferMeans(*map(add, vars(self).values(), vars(other).values()))

    def __truediv__(self, num_steps: int) -> TransferMeans:
        return TransferMeans(*(value / num_steps for value in vars(self).values()))


class TransferTimes:
    """Bytes and seconds by transfer, added up over the spans of steps since the last `take`."""

    def __init__(self) -> None:
        self.recent_spans: deque[TransferSpan] = deque(maxlen=NUM_RECENT_SPANS)
        """The last spans, in the order of their ends."""
        self.step: int | None = None
        """Steps that ended before the one under way; None where none is."""
        self._recording: list[TransferSpan] | None = None
        self._num_steps = 0
        self._sums: dict[str, TransferMeans] = {}
        self._lifetime_sums: dict[str, TransferMeans] = {}
        self._num_reported_steps = 0

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """While a step is under way; one that raises does not count as one."""
        self.step = self._num_steps
        try:
            yield
            self._num_steps += 1
        finally:
            self.step = None

    def add(self, span: TransferSpan) -> None:
        """One that has ended."""
        self.recent_spans.append(span)
        if self._recording is not None:
            self._recording.append(span)
        if span.step is not None:
            seconds = span.done_s - span.begin_s
            one = TransferMeans(1, span.intra_host_bytes, span.inter_host_bytes, seconds, span.wait_s)
            _add_to_sums(self._sums, span.name, one)

    def start_recording(self) -> None:
        """Keep all spans from now on, until `recorded`."""
        self._recording = []

    def stop_recording(self) -> list[TransferSpan]:
        """Those that have ended since `record`, in the order of their ends."""
        spans, self._recording = self._recording or [], None
        return spans

    def pop_means(self) -> dict[str, TransferMeans]:
        """Means per step of each transfer since the last call."""
        num_steps, self._num_reported_steps = self._num_steps - self._num_reported_steps, self._num_steps
        sums, self._sums = self._sums, {}
        for name, one in sums.items():
            _add_to_sums(self._lifetime_sums, name, one)
        return _per_step(sums, num_steps)

    def lifetime_means(self) -> dict[str, TransferMeans]:
        """Means per step of each transfer, over all that was taken."""
        return _per_step(self._lifetime_sums, self._num_reported_steps)


def _add_to_sums(sums: dict[str, TransferMeans], name: str, one: TransferMeans) -> None:
    sums[name] = sums[name] + one if name in sums else one


def _per_step(sums: dict[str, TransferMeans], num_steps: int) -> dict[str, TransferMeans]:
    return {name: one / max(num_steps, 1) for name, one in sums.items() if name in STEP_TRANSFERS}
