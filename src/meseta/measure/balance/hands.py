"""What each device of a plan holds, and what a plan costs once every hand is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meseta.measure.tasks import Piece
from meseta.planner import predict
from meseta.planner.loads import WorkloadLoads
from meseta.spec import CostModel, MesetaError, Plan, Topology, Workload
from meseta.spec.tiers import HBM


@dataclass(frozen=True, kw_only=True)
class Hand:
    """The pieces of one device."""

    pieces: tuple[Piece, ...]
    """Its own, ordered."""
    replicas: tuple[Piece, ...]
    """Those that every device holds."""

    @property
    def is_empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not (self.pieces or self.replicas)


TimeHand = Callable[[Hand], tuple[float, float]]
"""Seconds of (a lookup, an update) of a hand, measured once."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step of a plan takes."""

    lookup_s: tuple[float, ...]
    """Of each device, measured."""
    update_s: tuple[float, ...]
    """Of each device, measured."""
    communication_s: float
    """Of all collectives, predicted."""
    predicted_s: float
    """Of the whole step, by the cost model alone."""

    @property
    def step_s(self) -> float:
        """The slowest device's lookup and update, and the collectives."""
        each = (lookup + update for lookup, update in zip(self.lookup_s, self.update_s, strict=True))
        return max(each) + self.communication_s


def hands_of(plan: Plan, workload: Workload) -> tuple[Hand, ...]:
    """The hand of each rank. Raises MesetaError where a plan does not place every table exactly once, or places rows
    outside the memory of the devices, which nothing here can time."""
    plan.check(workload.tables)
    number = {table.name: n for n, table in enumerate(workload.tables)}
    owned: list[list[Piece]] = [[] for _ in range(plan.num_ranks)]
    replicas: list[Piece] = []
    for entry in plan.tables:
        for shard in entry.shards:
            if shard.tier != HBM:
                raise MesetaError(
                    f"plan: table {entry.table!r} has rows in tier {shard.tier!r}, and only 'hbm' can be timed; "
                    "leave host_bytes and disk_bytes out of the topology"
                )
            piece = (number[entry.table], shard.rows, shard.columns)
            if entry.is_replica(shard):
                replicas.append(piece)
            else:
                owned[shard.ranks[0]].append(piece)
    return tuple(Hand(pieces=tuple(sorted(own)), replicas=tuple(sorted(replicas))) for own in owned)


def why_too_large(plan: Plan, workload: Workload, topology: Topology, cost_model: CostModel) -> str | None:
    """None where all ranks have room for a plan: rows, state, and a step's buffers as `predict` counts them."""
    if topology.hbm_bytes is None:
        return None
    peak = predict(plan, workload, topology, cost_model).peak_bytes()
    if peak.max() <= topology.hbm_bytes:
        return None
    return f"rank {int(peak.argmax())} would hold {peak.max():,.0f} bytes"


def judge(
    plans: Mapping[str, Plan],
    workload: Workload,
    topology: Topology,
    cost_model: CostModel,
    time_hand: TimeHand,
    num_rounds: int,
) -> dict[str, Cost]:
    """Cost of several plans of one workload, by name.

    Hands are timed alone, one after the other, in `num_rounds` rounds in turns over the hands of all plans, so that
    whatever the machine does meets all alike; the median of the rounds counts. Hands that several devices or plans have
    in common are timed once. Collectives cost what the cost model says, by the same formula for all.
    """
    hands = {name: hands_of(plan, workload) for name, plan in plans.items()}
    found: dict[Hand, list[tuple[float, float]]] = {hand: [] for own in hands.values() for hand in own}
    for _ in range(num_rounds):
        for hand, seconds in found.items():
            seconds.append((0.0, 0.0) if hand.is_empty else time_hand(hand))
    medians = {hand: tuple(map(statistics.median, zip(*seconds, strict=True))) for hand, seconds in found.items()}
    loads = WorkloadLoads(workload)
    costs = {}
    for name, plan in plans.items():
        predicted = predict(plan, workload, topology, cost_model, loads=loads)
        compute_s = float(predicted.compute_s.max())
        costs[name] = Cost(
            lookup_s=tuple(medians[hand][0] for hand in hands[name]),
            update_s=tuple(medians[hand][1] for hand in hands[name]),
            communication_s=predicted.step_s - compute_s - float(predicted.seconds["dense"].max()),
            predicted_s=predicted.step_s,
        )
    return costs
