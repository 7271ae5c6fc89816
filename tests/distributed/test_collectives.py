"""The collectives of a World against plain indexing, on tensors whose values are their addresses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meseta.comm import ExchangeScope, World
from meseta.comm.world import TRANSPORT_THREAD_NAMES
from meseta.spec import MesetaError

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
    got = world.all_to_all(send, size_of[world.rank], receive, "measurement").wait()
    expected = [[100 * r + world.rank, i, 7] for r, n in enumerate(receive) for i in range(n)]
    return got.tolist() == expected


@pytest.mark.parametrize("sizes", [[[1, 2], [3, 0]], [[0, 0], [0, 0]], [[0, 5], [0, 0]]])
def test_all_to_all(ranks: Ranks, sizes: list[list[int]]) -> None:
    assert ranks(2).run(exchange, sizes) == [True, True]


def policies() -> tuple[int, dict[str, set[int]]]:
    """How the system schedules this thread, and each kind of thread that carries messages, of both groups."""
    World.current().new_background_world()
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread of others has ended meanwhile
            found.setdefault((task / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(task.name)))
    return os.sched_getscheduler(0), {name: found[name] for name in TRANSPORT_THREAD_NAMES}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no such policy here")
def test_what_carries_messages_interrupts_no_thread_that_computes(ranks: Ranks) -> None:
    expected = os.SCHED_OTHER, {name: {os.SCHED_BATCH} for name in TRANSPORT_THREAD_NAMES}
    assert ranks(2).run(policies) == [expected, expected]


def others() -> list[object]:
    world = World.current()
    mine = torch.tensor([[world.rank + 1.0, 10.0]])
    gathered = world.all_gather(mine, "measurement")
    empty = world.all_gather(torch.empty(0, 3), "measurement")
    broadcast = world.broadcast(mine.clone())
    total = world.all_reduce(mine.clone(), "measurement")
    world.barrier()
    return [
        gathered.tolist(),
        list(empty.shape),
        broadcast.tolist(),
        total.tolist(),
        world.all_gather_object(world.rank),
    ]


def test_gather_broadcast_and_reduce(ranks: Ranks) -> None:
    expected = [[[[1.0, 10.0]], [[2.0, 10.0]]], [2, 0, 3], [[1.0, 10.0]], [[3.0, 20.0]], [0, 1]]
    assert ranks(2).run(others) == [expected, expected]


AGREED: dict[str, list[Any]] = {
    "sent": [[2, 3], [3, 3]],
    "expected": [[2, 3], [3, 3]],
    "dtype": ["float32", "float32"],
    "name": ["embeddings", "embeddings"],
    "batch": [1, 1],
}
"""By rank."""


def exchange_as_told(changes: dict[str, list[Any]]) -> tuple[str, bool]:
    """What is raised where ranks do not agree on a transfer, and whether the next one arrives."""
    world = World.current()
    mine = {key: by_rank[world.rank] for key, by_rank in {**AGREED, **changes}.items()}
    send = torch.zeros(sum(mine["sent"]), dtype=getattr(torch, mine["dtype"]))
    scope = ExchangeScope(tables=("a", "b"), batch_tag=mine["batch"])
    told = ""
    try:
        world.all_to_all(send, mine["sent"], mine["expected"], mine["name"], scope=scope).wait()
    except MesetaError as error:
        told = str(error)
    return told, exchange([[1, 2], [3, 0]])


@pytest.mark.parametrize(
    "changes",
    [
        {"sent": [[2, 2], [3, 3]]},  # too short: gloo fills a part of the memory
        {"sent": [[2, 4], [3, 3]]},  # too long: gloo ends the process
        {"sent": [[2, 0], [3, 3]]},
        {"expected": [[2, 0], [3, 3]]},
        {"dtype": ["float32", "float64"]},
        {"name": ["embeddings", "gradients"]},
        {"batch": [1, 2]},
    ],
)
def test_ranks_that_disagree_are_told_before_a_byte_is_used(ranks: Ranks, changes: dict[str, list[Any]]) -> None:
    for rank, (told, works) in enumerate(ranks(2).run(exchange_as_told, changes)):
        assert f"rank {rank} is at '" in told and f"with rank {1 - rank}, which is at '" in told
        assert "of tables a, b" in told and works


def test_agreeing_ranks_are_told_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(exchange_as_told, {}) == [("", True)] * 2


def spans() -> list[tuple[str, int, float, float]]:
    """Of an all-to-all of float64 on hosts of two ranks, an all-gather and sums, of which one is not waited for."""
    world = World.current().with_ranks_per_host(2)
    sizes = [world.rank + 1] * world.size
    send = torch.zeros(sum(sizes), 5, dtype=torch.float64)
    world.all_to_all(send, sizes, list(range(1, world.size + 1)), "ids").wait()
    world.all_gather(torch.zeros(3), "batch norm")
    world.all_reduce(torch.zeros(8), "dense")
    world.all_reduce_small(torch.zeros(2), "agree")
    pending = world.start_all_reduce(torch.zeros(8), "replicas")
    told = [
        (one.name, one.num_peers, one.intra_host_bytes, one.inter_host_bytes) for one in world.transfers.recent_spans
    ]
    pending.wait()
    assert all(0 <= one.wait_s <= one.done_s - one.begin_s for one in world.transfers.recent_spans)
    return told


def test_spans_say_what_left_a_rank(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks(4).run(spans)):
        size = 40.0 * (rank + 1)
        # A sum of 32 bytes on two hosts of two: a half inside, there and back, and a half of a half across, likewise.
        expected = [("ids", 3, size, 2 * size), ("batch norm", 3, 12.0, 24.0), ("dense", 3, 32.0, 16.0)]
        assert told == [*expected, ("agree", 3, 8.0, 16.0)], "what nobody has waited for has not ended"
