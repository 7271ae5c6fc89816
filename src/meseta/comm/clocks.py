"""Offsets between the clocks of ranks, estimated from collectives.

Ranks on one host share a clock. For other pairs, Cristian's method (1989) is applied to all-gathers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch

from meseta.comm.world import World
from meseta.system.kernel import clock_id
from meseta.telemetry.timeline import RankClock

# No rank leaves an all-gather before all ranks have entered it. Each all-gather therefore bounds the offset between two
# clocks from both sides:
#
#     rank 0     enters 10.000                       leaves 10.004
#     rank 1     enters 73.001                       leaves 73.004
#     73.001 + offset < 10.004 and 10.000 < 73.004 + offset, so the offset is -63.0005 +- 0.0035
#
# The bounds also hold for a link that is faster in one direction, which cannot be measured.
NUM_CLOCK_EXCHANGES = 16
"""Number of all-gathers. The one with the shortest delay gives the tightest bounds."""
EnterLeaveTimes = Sequence[tuple[float, float]]
"""Times at which a rank entered and left each all-gather, in seconds of its clock."""


def measure_rank_clocks(world: World) -> list[RankClock]:
    """Return the host and the clock offset of each rank, measured within a few milliseconds. Collective."""
    moments = []
    for _ in range(NUM_CLOCK_EXCHANGES if world.size > 1 else 0):
        enter_s = time.perf_counter()
        world.all_gather(torch.zeros(1), "measurement")
        moments.append((enter_s, time.perf_counter()))
    gathered = world.all_gather_object((socket.gethostname(), clock_id() or f"of rank {world.rank}", moments))
    hosts, clocks, moments_per_rank = zip(*gathered, strict=True)
    return [
        RankClock(host, *pair) for host, pair in zip(hosts, estimate_offsets(clocks, moments_per_rank), strict=True)
    ]


def estimate_offsets(clocks: Sequence[str], moments: Sequence[EnterLeaveTimes]) -> list[tuple[float, float]]:
    """Return the offset of each rank's clock from that of rank 0 and its maximum error, both in seconds.

    `clocks` identifies the clock of each rank. Ranks with the same identifier share a clock. `moments` has the times of
    each rank, for the same all-gathers in the same order.
    """
    offsets: dict[str, tuple[float, float]] = {clocks[0]: (0.0, 0.0)}
    reference_moments = [of_rank for clock, of_rank in zip(clocks, moments, strict=True) if clock == clocks[0]]
    for clock in dict.fromkeys(clocks):
        if clock not in offsets:
            moments_of_clock = [of_rank for one, of_rank in zip(clocks, moments, strict=True) if one == clock]
            pairs = [pair for a in reference_moments for b in moments_of_clock for pair in zip(a, b, strict=True)]
            low = max(enter_s - leave_s for (enter_s, _), (_, leave_s) in pairs)
            high = min(leave_s - enter_s for (_, leave_s), (enter_s, _) in pairs)
            offsets[clock] = (low + high) / 2, abs(high - low) / 2
    return [offsets[clock] for clock in clocks]
