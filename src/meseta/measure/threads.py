"""Temporary change of the number of compute threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from meseta.measure import cpu_contention


@contextmanager
def use_num_threads(count: int) -> Iterator[None]:
    """Context manager that sets torch's number of threads to `count`. The compiled core uses the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SAMPLE_WINDOW_S = 0.1
"""Total duration of the steps that form one window, which is one measurement."""
MIN_SAMPLES, MAX_SAMPLES = 3, 8
"""Measurements of each number of threads: required before the faster one is chosen, and kept for the comparison."""
NUM_WINDOWS_PER_RETRY = 32
"""Interval of the windows that use the slower number of threads, because it may have become the faster one."""


class StepThreads:
    """Context manager that chooses the number of threads for each step of a loop.

    The thread that computes the step must enter it. While other programs leave too few processors, a step uses either
    all threads, or as many as there are free processors. Both are timed, and most steps use the faster one. The number
    of threads does not change results. Without contention, all threads are used. Outside
    `cpu_contention.adaptive_wait_policy`, this class has no effect.
    """

    # Which number is faster depends on model, batch and machine. Many short matrix products lose time if threads wait
    # for one that has no processor. In long products, more threads get a larger share of the processors.

    def __init__(self) -> None:
        self._times: dict[bool, deque[float]] = {fits: deque(maxlen=MAX_SAMPLES) for fits in (True, False)}
        """Seconds per step in recent windows. The key is true for windows with fewer threads."""
        self._num_windows = 0
        self._num_steps = 0
        """Number of steps in the current window."""
        self._window_s = 0.0
        self._num_threads = 0
        self._uses_fewer_threads = False
        self._start_s: float | None = None

    def __enter__(self) -> None:
        contention = cpu_contention.current_contention()
        self._start_s = None
        if contention is None:
            return
        is_contended = contention.is_contended  # Read once, because another thread changes it.
        if not is_contended:
            self._num_steps, self._num_threads = 0, contention.num_threads
        elif self._num_steps == 0:
            self._window_s, self._uses_fewer_threads = 0.0, self._should_use_fewer_threads()
            self._num_threads = contention.num_usable_threads if self._uses_fewer_threads else contention.num_threads
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if is_contended:
            self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._start_s is None:
            return
        self._num_steps += 1
        self._window_s += time.perf_counter() - self._start_s
        if self._window_s >= SAMPLE_WINDOW_S:
            self._times[self._uses_fewer_threads].append(self._window_s / self._num_steps)
            self._num_steps = 0

    def _should_use_fewer_threads(self) -> bool:
        """Whether the next window uses only as many threads as there are free processors."""
        if min(map(len, self._times.values())) < MIN_SAMPLES:
            return len(self._times[True]) <= len(self._times[False])
        faster = median(self._times[True]) < median(self._times[False])
        self._num_windows += 1
        return faster != (self._num_windows % NUM_WINDOWS_PER_RETRY == 0)
