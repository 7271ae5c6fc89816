"""Work on blocks by several threads, whose results come in the order of the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], num_ahead: int) -> Iterator[Result]:
    """Results of `jobs` in their order, at most `num_ahead` of them begun and not yet taken."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= num_ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
