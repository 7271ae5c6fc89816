"""Threads of OpenMP that spin while they have the processors for themselves, and sleep while others want them."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meseta.machine.environment_variables import environ
from meseta.machine.wait_policy import has_default_policy
from meseta.measure.cpu_usage import read_cpu_time

POLL_INTERVAL_S = 0.2
"""Between looks at who uses the processors."""
NUM_CALM_POLLS = 5
"""Looks in a row that must find room before threads spin again."""
LOAD_MARGIN = 0.25
"""Processors that others may use before the machine counts as crowded: the kernel's clock ticks are coarse."""


class CpuContention:
    """Whether others leave this process fewer processors than it has threads, look by look."""

    def __init__(self, num_threads: int, num_processors: int, min_threads: int = 1) -> None:
        """Of a process that computes on `num_threads`, and may on as few as `min_threads`."""
        self.num_threads = self.num_usable_threads = num_threads
        """On how many it computes, and how many fit beside the others of the last look."""
        self.is_contended = False
        self._num_processors, self._min_threads = num_processors, min_threads
        self._num_calm_polls = 0

    def update(self, others: float) -> bool:
        """Take note of the processors that others keep busy. Crowded at once, calm after NUM_CALM_POLLS looks."""
        left = self._num_processors - math.ceil(others - LOAD_MARGIN)
        self.num_usable_threads = max(self._min_threads, min(left, self.num_threads))
        self._num_calm_polls = 0 if left < self.num_threads else self._num_calm_polls + 1
        if self._num_calm_polls == 0 or self._num_calm_polls >= NUM_CALM_POLLS:
            self.is_contended = self._num_calm_polls == 0
        return self.is_contended


_active_contention: list[CpuContention] = []
"""Inside of `adaptive_wait_policy`: what its thread sees."""


def current_contention() -> CpuContention | None:
    """What the thread of `adaptive_wait_policy` sees; None outside of it, and where nobody looks."""
    return _active_contention[-1] if _active_contention else None


@contextmanager
def adaptive_wait_policy(num_threads: int, min_threads: int = 1) -> Iterator[None]:
    """Inside, a thread looks at who uses the processors of this process, which computes on `num_threads`.

    While others leave too few, OpenMP's threads sleep as soon as they wait, and `crowd` tells loops of steps, which may
    compute on fewer threads, down to `min_threads`: meseta.measure.step_threads. The numbers that they compute stay the
    same. Nothing happens where the user chose how threads wait, with one thread, or on a runtime that is not GNU's.
    """
    runtime = _find_libgomp() if num_threads > 1 and has_default_policy(environ) else None
    if runtime is None:
        yield
        return
    processors = sorted(os.sched_getaffinity(0))
    seen, ended = CpuContention(num_threads, len(processors), min_threads), threading.Event()
    watcher = threading.Thread(
        target=_monitor, args=(runtime, seen, processors, ended), name="meseta-waiting", daemon=True
    )
    watcher.start()
    _active_contention.append(seen)
    try:
        yield
    finally:
        _active_contention.remove(seen)
        ended.set()
        watcher.join()


class OversubscriptionThreads:
    """Threads that sleep, so that the runtime has more of them than processors; then it lets none of them spin.

    They belong to a thread of their own and end with it.
    """

    def __init__(self, runtime: Any, num_threads: int) -> None:
        """Start them, for a process that computes on `num_threads`."""
        self._stop_event = threading.Event()
        started = threading.Event()
        # The runtime counts the processors that it saw when it was loaded, which may have been all.
        size = max((os.cpu_count() or 1) - num_threads, 0) + 2

        def hold() -> None:
            runtime.GOMP_parallel(ctypes.cast(runtime.omp_get_level, ctypes.c_void_p), None, size, 0)
            started.set()
            self._stop_event.wait()

        self._thread = threading.Thread(target=hold, name="meseta-spare", daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Let them go; from now on others may spin again."""
        self._stop_event.set()
        self._thread.join()


def _monitor(runtime: Any, seen: CpuContention, processors: list[int], ended: threading.Event) -> None:
    spare = None
    before, then_s = read_cpu_time([os.getpid()], processors), time.monotonic()
    while not ended.wait(POLL_INTERVAL_S):
        now, now_s = read_cpu_time([os.getpid()], processors), time.monotonic()
        is_crowded = seen.update(now.background_load_since(before, now_s - then_s))
        before, then_s = now, now_s
        if is_crowded and spare is None:
            spare = OversubscriptionThreads(runtime, seen.num_threads)
        elif not is_crowded and spare is not None:
            spare.stop()
            spare = None
    if spare is not None:
        spare.stop()


def _find_libgomp() -> Any:
    """GNU's OpenMP as this process has loaded it; None where it has another one, or cannot tell."""
    try:
        found = re.search(r"/\S*/libgomp[^/\s]*\.so\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return ctypes.CDLL(found[0]) if found else None
    except OSError:
        return None
