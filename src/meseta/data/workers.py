"""Parallel work on blocks with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], num_ahead: int) -> Iterator[Result]:
    """Run `jobs` in a pool and yield their results in order.

    At most `num_ahead` jobs are submitted whose results have not been yielded.
    """
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= num_ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
