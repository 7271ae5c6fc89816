"""The collectives of a World against plain indexing, on tensors whose values are their addresses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meseta.comm import World

from .pool import RankPool

Ranks = Callable[[int], RankPool]


def exchange(size_of: list[list[int]]) -> bool:
    """Rank r sends size_of[r][q] rows [100 r + q, position, 7] to rank q."""
    world = World.current()
    rows = [
        torch.tensor([[100 * world.rank + q, i, 7] for i in range(n)], dtype=torch.float64).view(-1, 3)
        for q, n in enumerate(size_of[world.rank])
    ]
    receive = [size_of[r][world.rank] for r in range(world.size)]
    # A view with gaps: the transport must not read what lies between.
    send = torch.full((sum(size_of[world.rank]), 6), torch.nan, dtype=torch.float64)[:, ::2]
    send.copy_(torch.cat(rows))
    got = world.all_to_all(send, size_of[world.rank], receive, "a measurement").wait()
    expected = [[100 * r + world.rank, i, 7] for r, n in enumerate(receive) for i in range(n)]
    return got.tolist() == expected


@pytest.mark.parametrize("sizes", [[[1, 2], [3, 0]], [[0, 0], [0, 0]], [[0, 5], [0, 0]]])
def test_all_to_all(ranks: Ranks, sizes: list[list[int]]) -> None:
    assert ranks(2).run(exchange, sizes) == [True, True]


def others() -> list[object]:
    world = World.current()
    mine = torch.tensor([[world.rank + 1.0, 10.0]])
    gathered = world.all_gather(mine, "a measurement")
    empty = world.all_gather(torch.empty(0, 3), "a measurement")
    broadcast = world.broadcast(mine.clone())
    total = world.all_reduce(mine.clone(), "a measurement")
    world.barrier()
    return [gathered.tolist(), list(empty.shape), broadcast.tolist(), total.tolist(), world.gather_objects(world.rank)]


def test_gather_broadcast_and_reduce(ranks: Ranks) -> None:
    expected = [[[[1.0, 10.0]], [[2.0, 10.0]]], [2, 0, 3], [[1.0, 10.0]], [[3.0, 20.0]], [0, 1]]
    assert ranks(2).run(others) == [expected, expected]
