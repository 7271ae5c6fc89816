"""Parallel jobs with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], num_ahead: int) -> Iterator[Result]:
    """Run `jobs` in `pool` and yield their results in order. At most `num_ahead` jobs run ahead of the consumer."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= num_ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
