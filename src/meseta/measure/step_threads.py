"""On how many threads a loop's steps compute while other programs use the processors, too."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import torch

from meseta.measure import cpu_contention

SAMPLE_WINDOW_S = 0.1
"""Steps that together take this long are one measurement."""
MIN_SAMPLES, MAX_SAMPLES = 3, 8
"""Measurements of each way before one is chosen, and those that count later on."""
NUM_WINDOWS_PER_RETRY = 32
"""Each so many slices one goes the way that was slower, which may have become the faster one."""


class StepThreads:
    """`with step_threads:` around each step of a loop, by the thread that computes it.

    While others leave fewer processors than the process has threads, steps go two ways: on all threads, or on as many
    as fit. Many short products in a row lose more to threads that wait for one without a processor than they gain by
    them; long ones take a larger share of the processors the more threads they have. Which holds follows from model,
    batch and machine, so both are timed, and most steps go the faster way. No number changes by it. In a calm machine,
    and outside of `waiting.adaptive_wait_policy`, nothing is done.
    """

    def __init__(self) -> None:
        self._times: dict[bool, deque[float]] = {fits: deque(maxlen=MAX_SAMPLES) for fits in (True, False)}
        """Whether steps go on as many threads as fit -> seconds a step, slice by slice."""
        self._num_windows = 0
        self._num_steps = 0
        """Of the present slice, which has taken `_window_s`."""
        self._window_s = 0.0
        self._num_threads = 0
        self._uses_fewer_threads = False
        self._start_s: float | None = None

    def __enter__(self) -> None:
        crowd = cpu_contention.current_contention()
        self._start_s = None
        if crowd is None:
            return
        is_crowded = crowd.is_contended  # another thread's
        if not is_crowded:
            self._num_steps, self._num_threads = 0, crowd.num_threads
        elif self._num_steps == 0:
            self._window_s, self._uses_fewer_threads = 0.0, self._should_use_fewer_threads()
            self._num_threads = crowd.num_usable_threads if self._uses_fewer_threads else crowd.num_threads
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if is_crowded:
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
        """Whether the next slice goes on as many threads as fit."""
        if min(map(len, self._times.values())) < MIN_SAMPLES:
            return len(self._times[True]) <= len(self._times[False])
        faster = median(self._times[True]) < median(self._times[False])
        self._num_windows += 1
        return faster != (self._num_windows % NUM_WINDOWS_PER_RETRY == 0)
