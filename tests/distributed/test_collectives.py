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
    """Send rows [100 r + q, position, 7], `size_of[r][q]` of them from rank r to rank q, and check those received."""
    world = World.current()
    rows = [
        torch.tensor([[100 * world.rank + q, i, 7] for i in range(n)], dtype=torch.float64).view(-1, 3)
        for q, n in enumerate(size_of[world.rank])
    ]
    receive = [size_of[r][world.rank] for r in range(world.size)]
    # A view with gaps: the transport must not read the columns between.
    send = torch.full((sum(size_of[world.rank]), 6), torch.nan, dtype=torch.float64)[:, ::2]
    send.copy_(torch.cat(rows))
    got = world.all_to_all(send, size_of[world.rank], receive, "measurement").wait()
    expected = [[100 * r + world.rank, i, 7] for r, n in enumerate(receive) for i in range(n)]
    return got.tolist() == expected


@pytest.mark.parametrize("sizes", [[[1, 2], [3, 0]], [[0, 0], [0, 0]], [[0, 5], [0, 0]]])
def test_all_to_all(ranks: Ranks, sizes: list[list[int]]) -> None:
    assert ranks(2).run(exchange, sizes) == [True, True]


def policies() -> tuple[int, dict[str, set[int]]]:
    """Return the scheduling policy of this thread, and those of each kind of transport thread."""
    World.current().new_background_world()
    policies_by_name: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            policies_by_name.setdefault((task / "comm").read_text().strip(), set()).add(
                os.sched_getscheduler(int(task.name))
            )
    return os.sched_getscheduler(0), {name: policies_by_name[name] for name in TRANSPORT_THREAD_NAMES}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no such policy here")
def test_transport_threads_do_not_preempt_computing_threads(ranks: Ranks) -> None:
    expected = os.SCHED_OTHER, {name: {os.SCHED_BATCH} for name in TRANSPORT_THREAD_NAMES}
    assert ranks(2).run(policies) == [expected, expected]


def other_collectives() -> list[object]:
    world = World.current()
    row = torch.tensor([[world.rank + 1.0, 10.0]])
    gathered = world.all_gather(row, "measurement")
    empty = world.all_gather(torch.empty(0, 3), "measurement")
    broadcast = world.broadcast(row.clone())
    total = world.all_reduce(row.clone(), "measurement")
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
    assert ranks(2).run(other_collectives) == [expected, expected]


AGREED: dict[str, list[Any]] = {
    "sent": [[2, 3], [3, 3]],
    "expected": [[2, 3], [3, 3]],
    "dtype": ["float32", "float32"],
    "name": ["embeddings", "embeddings"],
    "batch": [1, 1],
}
"""Arguments of a transfer, by rank."""


def exchange_with(changes: dict[str, list[Any]]) -> tuple[str, bool]:
    """Return the error of a transfer on which ranks may disagree, and whether the next transfer succeeds."""
    world = World.current()
    arguments = {key: by_rank[world.rank] for key, by_rank in {**AGREED, **changes}.items()}
    send = torch.zeros(sum(arguments["sent"]), dtype=getattr(torch, arguments["dtype"]))
    scope = ExchangeScope(tables=("a", "b"), batch_tag=arguments["batch"])
    text = ""
    try:
        world.all_to_all(send, arguments["sent"], arguments["expected"], arguments["name"], scope=scope).wait()
    except MesetaError as error:
        text = str(error)
    return text, exchange([[1, 2], [3, 0]])


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
def test_ranks_that_disagree_raise_before_a_byte_is_used(ranks: Ranks, changes: dict[str, list[Any]]) -> None:
    for rank, (text, works) in enumerate(ranks(2).run(exchange_with, changes)):
        assert f"rank {rank} is at '" in text and f"with rank {1 - rank}, which is at '" in text
        assert "of tables a, b" in text and works


def test_agreeing_ranks_raise_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(exchange_with, {}) == [("", True)] * 2


def spans() -> list[tuple[str, int, float, float]]:
    """Return the spans of an all-to-all, an all-gather and sums on hosts of two ranks. One sum is not waited for."""
    world = World.current().with_ranks_per_host(2)
    sizes = [world.rank + 1] * world.size
    send = torch.zeros(sum(sizes), 5, dtype=torch.float64)
    world.all_to_all(send, sizes, list(range(1, world.size + 1)), "ids").wait()
    world.all_gather(torch.zeros(3), "batch norm")
    world.all_reduce(torch.zeros(8), "dense")
    world.all_reduce_small(torch.zeros(2), "agree")
    pending = world.start_all_reduce(torch.zeros(8), "replicas")
    values = [
        (one.name, one.num_peers, one.intra_host_bytes, one.inter_host_bytes) for one in world.transfers.recent_spans
    ]
    pending.wait()
    assert all(0 <= one.wait_s <= one.done_s - one.begin_s for one in world.transfers.recent_spans)
    return values


def test_spans_count_the_bytes_that_a_rank_sends(ranks: Ranks) -> None:
    for rank, values in enumerate(ranks(4).run(spans)):
        size = 40.0 * (rank + 1)
        # A sum of 32 bytes on two hosts of two: a half inside and a quarter across, in both directions.
        expected = [("ids", 3, size, 2 * size), ("batch norm", 3, 12.0, 24.0), ("dense", 3, 32.0, 16.0)]
        assert values == [*expected, ("agree", 3, 8.0, 16.0)], "a transfer that no caller has waited for has not ended"
