"""Shards of each device of a plan, and the cost of a plan from their measured times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from common.timing import alternate

from meseta.measure.calibrate.calibration import measure_uncontended
from meseta.measure.calibrate.rank_timer import DeviceShards
from meseta.measure.calibrate.tasks import ShardingTask, TaskShard
from meseta.measure.harness.worker_group import WorkerGroup
from meseta.planner import predict
from meseta.planner.cost.loads import WorkloadLoads
from meseta.spec import CostModel, MesetaError, Plan, Topology, Workload
from meseta.spec.tiers import HBM

TimeShare = Callable[[DeviceShards], tuple[float, float]]
"""Function that measures (lookup seconds, update seconds) of a share once."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step of a plan."""

    lookup_s: tuple[float, ...]
    """Measured seconds by device."""
    update_s: tuple[float, ...]
    """Measured seconds by device."""
    communication_s: float
    """Predicted seconds of all collectives."""
    predicted_s: float
    """Predicted seconds of the step."""

    @property
    def step_s(self) -> float:
        """Seconds of the slowest device and of the collectives."""
        each = (lookup + update for lookup, update in zip(self.lookup_s, self.update_s, strict=True))
        return max(each) + self.communication_s


def shares_of(plan: Plan, workload: Workload) -> tuple[DeviceShards, ...]:
    """Return the share of each rank. Raises MesetaError if the plan is invalid or uses other tiers than 'hbm'."""
    plan.check(workload.tables)
    number = {table.name: n for n, table in enumerate(workload.tables)}
    owned: list[list[TaskShard]] = [[] for _ in range(plan.num_ranks)]
    replicas: list[TaskShard] = []
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
    return tuple(DeviceShards(shards=tuple(sorted(pieces)), replicas=tuple(sorted(replicas))) for pieces in owned)


def why_too_large(plan: Plan, workload: Workload, topology: Topology, cost_model: CostModel) -> str | None:
    """Return why a rank lacks memory for the plan, or `None` if all have enough."""
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
    time_share: TimeShare,
    num_rounds: int,
) -> dict[str, Cost]:
    """Measure the cost of several plans, by name. Shares of all plans are timed alternately, equal shares only once."""
    shares = {name: shares_of(plan, workload) for name, plan in plans.items()}
    calls = {
        share: partial(time_share, share) if not share.is_empty else lambda: (0.0, 0.0)
        for pieces in shares.values()
        for share in pieces
    }
    medians = {
        share: tuple(map(statistics.median, zip(*seconds, strict=True)))
        for share, seconds in alternate(calls, num_rounds).items()
    }
    loads = WorkloadLoads(workload)
    costs = {}
    for name, plan in plans.items():
        predicted = predict(plan, workload, topology, cost_model, loads=loads)
        compute_s = float(predicted.compute_s.max())
        costs[name] = Cost(
            lookup_s=tuple(medians[share][0] for share in shares[name]),
            update_s=tuple(medians[share][1] for share in shares[name]),
            communication_s=predicted.step_s - compute_s - float(predicted.seconds["dense"].max()),
            predicted_s=predicted.step_s,
        )
    return costs


def measure_share(
    team: WorkerGroup, task: ShardingTask, share: DeviceShards, num_ranks: int, num_threads: int
) -> tuple[float, float]:
    arguments = {"shards": share.shards, "replicas": share.replicas, "num_ranks": num_ranks, "threads": num_threads}
    return measure_uncontended(lambda: team.call("time_device", task=task.to_dict(), **arguments))
