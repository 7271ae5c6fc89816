"""Fixture with the pools of ranks that all distributed tests share."""

from collections.abc import Callable, Iterator

import pytest

from .pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Return a function that returns the pool of a size, and starts it on the first use."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
