"""Work on blocks by several threads, whose results come in the order of the blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def num_cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], num_ahead: int) -> Iterator[Result]:
    """Results of `jobs` in their order, at most `num_ahead` of them begun and not yet taken."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= num_ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
