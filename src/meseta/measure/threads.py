"""CPU time of this machine and some processes, to detect load by other programs. On Linux only, elsewhere zero."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from meseta.system.environment_variables import environ, has_default_policy


@dataclass(frozen=True)
class CpuTime:
    """Reading of the CPU time counters."""

    total_s: float
    process_s: float
    """CPU seconds of the selected processes."""

    def background_load_since(self, before: CpuTime, elapsed_s: float) -> float:
        """Return the mean number of processors that other programs kept busy since the reading `before`."""
        busy = (self.total_s - before.total_s) - (self.process_s - before.process_s)
        return max(busy, 0.0) / max(elapsed_s, 1e-9)


def read_cpu_time(pids: Sequence[int], processors: Sequence[int] | None = None) -> CpuTime:
    """Read the CPU time of `processors`, or all, and of the processes `pids`. Zeros if the system has no counters."""
    names = {"cpu"} if processors is None else {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # Fields in clock ticks: user nice system idle iowait irq softirq steal.
        ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in names]
        busy = sum(sum(counts) - counts[3] - counts[4] for counts in ticks)
        used = sum(_process_ticks(pid) for pid in pids)
    except (OSError, IndexError, ValueError):
        return CpuTime(0.0, 0.0)
    per_s = os.sysconf("SC_CLK_TCK")
    return CpuTime(busy / per_s, used / per_s)


def _process_ticks(pid: int) -> int:
    # The second field is the name in brackets. It may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


POLL_INTERVAL_S = 0.2
"""Seconds between readings of the CPU usage."""
NUM_CALM_POLLS = 5
"""Consecutive readings without contention before threads spin again."""
LOAD_MARGIN = 0.25
"""Number of processors that other programs may use without contention. The clock ticks of the kernel are coarse."""


class CpuContention:
    """State of contention: whether other programs leave this process fewer processors than it has threads."""

    def __init__(self, num_threads: int, num_processors: int, min_threads: int = 1) -> None:
        """Create the state of a process with `num_threads` compute threads, which may use as few as `min_threads`."""
        self.num_threads = self.num_usable_threads = num_threads
        """Number of compute threads of the process, and the number that fit on its free processors."""
        self.is_contended = False
        self._num_processors, self._min_threads = num_processors, min_threads
        self._num_calm_polls = 0

    def update(self, others: float) -> bool:
        """Record that `others` processors are busy with other programs, and return `is_contended`."""
        # Contention begins with the first such reading. It ends after NUM_CALM_POLLS readings without contention.
        left = self._num_processors - math.ceil(others - LOAD_MARGIN)
        self.num_usable_threads = max(self._min_threads, min(left, self.num_threads))
        self._num_calm_polls = 0 if left < self.num_threads else self._num_calm_polls + 1
        if self._num_calm_polls == 0 or self._num_calm_polls >= NUM_CALM_POLLS:
            self.is_contended = self._num_calm_polls == 0
        return self.is_contended


_active_contention: list[CpuContention] = []
# States of the entered `adaptive_wait_policy` contexts, innermost last.


def current_contention() -> CpuContention | None:
    """Return the state that `adaptive_wait_policy` monitors, or `None` if contention is not monitored."""
    return _active_contention[-1] if _active_contention else None


@contextmanager
def adaptive_wait_policy(num_threads: int, min_threads: int = 1) -> Iterator[None]:
    """Context manager that monitors contention for the processors of a process with `num_threads` compute threads.

    During contention, OpenMP threads sleep instead of spinning while they wait, and `StepThreads` uses fewer threads,
    at least `min_threads`. Results do not change. Has no effect with one thread, with a wait policy of the user, or if
    the OpenMP runtime is not libgomp.
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
    """Sleeping OpenMP threads that disable spinning in the whole process."""

    # libgomp lets no thread spin while it manages more threads than there are processors.

    def __init__(self, runtime: Any, num_threads: int) -> None:
        """Start the threads, given that the process already computes on `num_threads`."""
        self._stop_event = threading.Event()
        started = threading.Event()
        # The runtime uses the number of processors at the time it was loaded, which may be all of the machine.
        size = max((os.cpu_count() or 1) - num_threads, 0) + 2

        # The threads of the pool belong to the thread that starts the parallel region, and end with it.
        def hold() -> None:
            runtime.GOMP_parallel(ctypes.cast(runtime.omp_get_level, ctypes.c_void_p), None, size, 0)
            started.set()
            self._stop_event.wait()

        self._thread = threading.Thread(target=hold, name="meseta-spare", daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Stop the threads. Other threads may then spin again."""
        self._stop_event.set()
        self._thread.join()


def _monitor(runtime: Any, seen: CpuContention, processors: list[int], ended: threading.Event) -> None:
    spare = None
    before, then_s = read_cpu_time([os.getpid()], processors), time.monotonic()
    while not ended.wait(POLL_INTERVAL_S):
        now, now_s = read_cpu_time([os.getpid()], processors), time.monotonic()
        is_contended = seen.update(now.background_load_since(before, now_s - then_s))
        before, then_s = now, now_s
        if is_contended and spare is None:
            spare = OversubscriptionThreads(runtime, seen.num_threads)
        elif not is_contended and spare is not None:
            spare.stop()
            spare = None
    if spare is not None:
        spare.stop()


def _find_libgomp() -> Any:
    """Return the libgomp of this process, or `None` if it has another runtime or no readable memory map."""
    try:
        match = re.search(r"/\S*/libgomp[^/\s]*\.so\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return ctypes.CDLL(match[0]) if match else None
    except OSError:
        return None


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
MIN_SAMPLES, MAX_SAMPLES = 3, 8
NUM_WINDOWS_PER_RETRY = 32


class StepThreads:
    """Context manager that chooses the number of threads for each step of a loop.

    The thread that computes the step must enter it. The number of threads does not change results. Without contention,
    all threads are used. Outside `cpu_contention.adaptive_wait_policy`, this class has no effect.
    """

    # While other programs leave too few processors, a step uses either all threads, or as many as there are free
    # processors. Both are timed, and most steps use the faster one.

    # Which number is faster depends on model, batch and machine. Many short matrix products lose time if threads wait
    # for one that has no processor. In long products, more threads get a larger share of the processors.

    def __init__(self) -> None:
        self._times: dict[bool, deque[float]] = {fits: deque(maxlen=MAX_SAMPLES) for fits in (True, False)}
        self._num_windows = 0
        self._num_steps = 0
        """Number of steps in the current window."""
        self._window_s = 0.0
        self._num_threads = 0
        self._uses_fewer_threads = False
        self._start_s: float | None = None

    def __enter__(self) -> None:
        contention = current_contention()
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
