"""Seconds of the transfers that plans did not count before they stood in one list."""

from __future__ import annotations

from meseta.planner import documented_cost_model
from meseta.spec import Topology
from meseta.spec.transfer import COUNT_BYTES, NUM_AGREED_VALUES


def agreement_seconds(topology: Topology, num_flags: int) -> float:
    """Of the agreement on the loss, a few numbers from each rank to all others: docs/cost_model.md, stated anew.

    The latency of the farthest level, the time of the busiest link, and what is sent and received is packed.
    """
    ranks, per_host = topology.num_ranks, topology.devices_per_host
    if ranks == 1:
        return 0.0
    cost = documented_cost_model(topology.device).exchange
    near, far = topology.inside or cost.inside_all_to_all, topology.across or cost.across_all_to_all
    num_bytes = COUNT_BYTES * (NUM_AGREED_VALUES + num_flags)
    inside, across = num_bytes * (per_host - 1), num_bytes * (ranks - per_host)
    latency_s = near.latency_s if ranks == per_host else far.latency_s
    link_s = max(inside / near.bytes_per_s, across / far.bytes_per_s)
    return latency_s + link_s + 2 * (inside + across) * cost.copy_byte_s
