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

from meseta.machine.variables import variables
from meseta.machine.waiting import is_ours
from meseta.measure.quiet import processor_s

PERIOD_S = 0.2
"""Between looks at who uses the processors."""
NUM_CALM = 5
"""Looks in a row that must find room before threads spin again."""
MARGIN = 0.25
"""Processors that others may use before the machine counts as crowded: the kernel's clock ticks are coarse."""


class Crowd:
    """Whether others leave this process fewer processors than it has threads, look by look."""

    def __init__(self, num_threads: int, num_processors: int, min_threads: int = 1) -> None:
        """Of a process that computes on `num_threads`, and may on as few as `min_threads`."""
        self.num_threads = self.num_fitting = num_threads
        """On how many it computes, and how many fit beside the others of the last look."""
        self.is_crowded = False
        self._num_processors, self._min_threads = num_processors, min_threads
        self._num_calm = 0

    def look(self, others: float) -> bool:
        """Take note of the processors that others keep busy. Crowded at once, calm after NUM_CALM looks."""
        left = self._num_processors - math.ceil(others - MARGIN)
        self.num_fitting = max(self._min_threads, min(left, self.num_threads))
        self._num_calm = 0 if left < self.num_threads else self._num_calm + 1
        if self._num_calm == 0 or self._num_calm >= NUM_CALM:
            self.is_crowded = self._num_calm == 0
        return self.is_crowded


_watched: list[Crowd] = []
"""Inside of `sleep_when_crowded`: what its thread sees."""


def crowd() -> Crowd | None:
    """What the thread of `sleep_when_crowded` sees; None outside of it, and where nobody looks."""
    return _watched[-1] if _watched else None


@contextmanager
def sleep_when_crowded(num_threads: int, min_threads: int = 1) -> Iterator[None]:
    """Inside, a thread looks at who uses the processors of this process, which computes on `num_threads`.

    While others leave too few, OpenMP's threads sleep as soon as they wait, and `crowd` tells loops of steps, which may
    compute on fewer threads, down to `min_threads`: meseta.measure.step_threads. The numbers that they compute stay the
    same. Nothing happens where the user chose how threads wait, with one thread, or on a runtime that is not GNU's.
    """
    runtime = _runtime() if num_threads > 1 and is_ours(variables) else None
    if runtime is None:
        yield
        return
    processors = sorted(os.sched_getaffinity(0))
    seen, ended = Crowd(num_threads, len(processors), min_threads), threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(runtime, seen, processors, ended), name="meseta-waiting", daemon=True
    )
    watcher.start()
    _watched.append(seen)
    try:
        yield
    finally:
        _watched.remove(seen)
        ended.set()
        watcher.join()


class SpareTeam:
    """Threads that sleep, so that the runtime has more of them than processors; then it lets none of them spin.

    They belong to a thread of their own and end with it.
    """

    def __init__(self, runtime: Any, num_threads: int) -> None:
        """Start them, for a process that computes on `num_threads`."""
        self._ended = threading.Event()
        started = threading.Event()
        # The runtime counts the processors that it saw when it was loaded, which may have been all.
        size = max((os.cpu_count() or 1) - num_threads, 0) + 2

        def hold() -> None:
            runtime.GOMP_parallel(ctypes.cast(runtime.omp_get_level, ctypes.c_void_p), None, size, 0)
            started.set()
            self._ended.wait()

        self._thread = threading.Thread(target=hold, name="meseta-spare", daemon=True)
        self._thread.start()
        started.wait()

    def end(self) -> None:
        """Let them go; from now on others may spin again."""
        self._ended.set()
        self._thread.join()


def _watch(runtime: Any, seen: Crowd, processors: list[int], ended: threading.Event) -> None:
    spare = None
    before, then_s = processor_s([os.getpid()], processors), time.monotonic()
    while not ended.wait(PERIOD_S):
        now, now_s = processor_s([os.getpid()], processors), time.monotonic()
        is_crowded = seen.look(now.others_since(before, now_s - then_s))
        before, then_s = now, now_s
        if is_crowded and spare is None:
            spare = SpareTeam(runtime, seen.num_threads)
        elif not is_crowded and spare is not None:
            spare.end()
            spare = None
    if spare is not None:
        spare.end()


def _runtime() -> Any:
    """GNU's OpenMP as this process has loaded it; None where it has another one, or cannot tell."""
    try:
        found = re.search(r"/\S*/libgomp[^/\s]*\.so\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return ctypes.CDLL(found[0]) if found else None
    except OSError:
        return None
