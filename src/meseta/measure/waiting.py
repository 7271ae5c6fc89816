"""Threads of OpenMP that spin while they have the processors for themselves, and sleep while others want them."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meseta.measure.quiet import processor_s
from meseta.spec.waiting import is_ours

PERIOD_S = 0.2
"""Between looks at who uses the processors."""
NUM_CALM = 5
"""Looks in a row that must find room before threads spin again."""
MARGIN = 0.25
"""Processors that others may use before the machine counts as crowded: the kernel's clock ticks are coarse."""


@contextmanager
def sleep_when_crowded(num_threads: int) -> Iterator[None]:
    """Inside, a thread looks at who uses the processors of this process, which computes on `num_threads`.

    While others leave too few, OpenMP's threads sleep as soon as they wait. The numbers that they compute stay the
    same. Nothing happens where the user chose how threads wait, with one thread, or on a runtime that is not GNU's.
    """
    runtime = _runtime() if num_threads > 1 and is_ours(os.environ) else None
    if runtime is None:
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(runtime, num_threads, ended), name="meseta-waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Crowd:
    """Whether others leave this process fewer processors than it has threads, look by look."""

    def __init__(self, num_threads: int, num_processors: int) -> None:
        self.is_crowded = False
        self._room = num_processors - num_threads + MARGIN
        self._num_calm = 0

    def look(self, others: float) -> bool:
        """Take note of the processors that others keep busy. Crowded at once, calm after NUM_CALM looks."""
        self._num_calm = 0 if others > self._room else self._num_calm + 1
        if self._num_calm == 0 or self._num_calm >= NUM_CALM:
            self.is_crowded = self._num_calm == 0
        return self.is_crowded


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


def _watch(runtime: Any, num_threads: int, ended: threading.Event) -> None:
    processors = sorted(os.sched_getaffinity(0))
    crowd, spare = Crowd(num_threads, len(processors)), None
    before, then_s = processor_s([os.getpid()], processors), time.monotonic()
    while not ended.wait(PERIOD_S):
        now, now_s = processor_s([os.getpid()], processors), time.monotonic()
        is_crowded = crowd.look(now.others_since(before, now_s - then_s))
        before, then_s = now, now_s
        if is_crowded and spare is None:
            spare = SpareTeam(runtime, num_threads)
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
