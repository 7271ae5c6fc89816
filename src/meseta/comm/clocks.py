"""The clocks of ranks beside each other: ranks of one host read one clock, and others are aligned by exchanges.

No rank leaves an exchange among all before every rank has entered it. So each exchange bounds how far two clocks are
apart from both sides, and the narrowest bounds of several hold; Cristian's method (1989), with all ranks at a time:

    rank 0     enters 10.000                       leaves 10.004
    rank 1     enters 73.001                       leaves 73.004
    73.001 + offset < 10.004 and 10.000 < 73.004 + offset: the offset is -63.0005 +- 0.0035

A link that is quicker one way than the other shows in no exchange; the bounds hold it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch

from meseta.comm.world import World
from meseta.machine.kernel import clock_id
from meseta.telemetry.timeline import RankClock

NUM_CLOCK_EXCHANGES = 16
"""The narrowest bounds are those of the exchange that was held up least."""
EnterLeaveTimes = Sequence[tuple[float, float]]
"""When a rank has entered each exchange, and left it, by its clock."""


def measure_rank_clocks(world: World) -> list[RankClock]:
    """By rank; a few milliseconds. Collective."""
    moments = []
    for _ in range(NUM_CLOCK_EXCHANGES if world.size > 1 else 0):
        enter_s = time.perf_counter()
        world.all_gather(torch.zeros(1), "measurement")
        moments.append((enter_s, time.perf_counter()))
    told = world.all_gather_object((socket.gethostname(), clock_id() or f"of rank {world.rank}", moments))
    hosts, clocks, of_ranks = zip(*told, strict=True)
    return [RankClock(host, *pair) for host, pair in zip(hosts, estimate_offsets(clocks, of_ranks), strict=True)]


def estimate_offsets(clocks: Sequence[str], moments: Sequence[EnterLeaveTimes]) -> list[tuple[float, float]]:
    """Offset and error in seconds of each rank's clock from that of rank 0.

    Args:
        clocks: of each rank; equal ones are one clock.
        moments: of each rank, of the same exchanges in the same order.
    """
    found: dict[str, tuple[float, float]] = {clocks[0]: (0.0, 0.0)}
    here = [of_rank for clock, of_rank in zip(clocks, moments, strict=True) if clock == clocks[0]]
    for clock in dict.fromkeys(clocks):
        if clock not in found:
            there = [of_rank for one, of_rank in zip(clocks, moments, strict=True) if one == clock]
            pairs = [pair for a in here for b in there for pair in zip(a, b, strict=True)]
            low = max(enter_s - leave_s for (enter_s, _), (_, leave_s) in pairs)
            high = min(leave_s - enter_s for (_, leave_s), (enter_s, _) in pairs)
            found[clock] = (low + high) / 2, abs(high - low) / 2
    return [found[clock] for clock in clocks]
