"""The pools that all distributed tests share."""

from collections.abc import Callable, Iterator

import pytest

from .pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2).run(function, ...)`: the pool of that size, started at its first use."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
