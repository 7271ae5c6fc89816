"""Predicted seconds of a step and memory of each rank under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.documented import documented_cost_model
from meseta.planner.cost.exchange import Collective, collectives
from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, ShardLoads, WorkloadLoads
from meseta.planner.cost.memory import MemoryBytes, PlanLoads, RunBytes, memory_bytes
from meseta.planner.cost.neural import collective_correction, rank_seconds
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.cost.placement import CacheOptions, Placement
from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.schedule import ALL_REDUCES, OverlappedStep, TransferCost, dense_op_seconds, schedule_for
from meseta.spec import CostModel, MesetaError, Plan, Topology, Workload
from meseta.spec.stages import STEP_COMPONENTS, StepComponent
from meseta.spec.tiers import HBM, MEMORIES, Memory
from meseta.spec.transfer import step_transfers
from meseta.telemetry.span import TransferMeans

COMPUTE_COMPONENTS = ("lookup", "table_update")
"""Components in which ranks do not wait for each other."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a plan. Arrays of shape [R] have one entry per rank."""

    seconds: Mapping[StepComponent, Floats]
    """Seconds of each component of a step on each rank [R]. The keys are `STEP_COMPONENTS`, and transfers count with
    their exposed time."""
    step_s: float
    bottleneck: int
    """Rank with the longest lookup and update together."""
    memory_bytes: MemoryBytes
    """Bytes of each rank [R] by phase and memory."""
    collectives: tuple[Collective, ...]
    """Collectives of a step, with the bytes that each rank sends and receives."""
    collective_s: tuple[Floats, ...]
    """Seconds of each collective on each rank [R], including packing, encoding and decoding."""
    link_s: tuple[Floats, ...]
    """Part of `collective_s` without packing, encoding and decoding."""
    exposed_s: tuple[Floats, ...]
    """Seconds that each rank [R] waits for each collective. Equal to `link_s` if nothing overlaps."""
    disk_s: Floats
    """Seconds per step that disks are busy for each rank [R], while it trains the previous batch."""
    cache_misses: Mapping[str, float]
    """Row cache misses per step over all ranks, by offloaded table."""

    @property
    def num_ranks(self) -> int:
        return len(self.seconds["lookup"])

    @property
    def compute_s(self) -> Floats:  # [R]
        return self.seconds["lookup"] + self.seconds["table_update"]

    @property
    def transfers_by_rank(self) -> list[dict[str, TransferMeans]]:
        """Transfers of a step for each rank, by name: sent bytes, duration and waiting time."""
        transfers: list[dict[str, TransferMeans]] = [{} for _ in range(self.num_ranks)]
        for one, seconds, waited in zip(self.collectives, self.collective_s, self.exposed_s, strict=True):
            for rank, of_rank in enumerate(transfers):
                sent = float(one.sent_intra_host[rank]), float(one.sent_inter_host[rank])
                means = TransferMeans(one.num_calls, *sent, float(seconds[rank]), float(waited[rank]))
                of_rank[one.name] = of_rank[one.name] + means if one.name in of_rank else means
        return transfers

    def peak_bytes(self, memory: Memory = HBM) -> Floats:
        """Return the maximum over all phases of the bytes of each rank [R] in one memory."""
        return np.max([held[memory] for held in self.memory_bytes.values()], axis=0)

    def fullest_ranks(self) -> dict[Memory, int]:
        """Return the rank that holds the most of each memory in use."""
        peaks = {memory: self.peak_bytes(memory) for memory in MEMORIES}
        return {memory: int(held.argmax()) for memory, held in peaks.items() if held.any()}

    def most_loaded_ranks(self, max_ranks: int) -> list[int]:
        """Return at most `max_ranks` ranks in ascending order: the fullest of each memory, then the busiest."""
        busiest = sorted(range(self.num_ranks), key=lambda rank: -self.compute_s[rank])
        return sorted(list(dict.fromkeys([*self.fullest_ranks().values(), *busiest]))[:max_ranks])


def predict(
    plan: Plan,
    workload: Workload,
    topology: Topology,
    cost_model: CostModel | None = None,
    *,
    loads: WorkloadLoads | None = None,
    run: RunBytes | None = None,
) -> Prediction:
    """Predict a training step of `workload` on `topology` under a valid `plan`.

    Without a cost model, the documented constants of the device are used. `loads` avoids computing the loads of
    `workload` again. `run` is the memory that a run needs in addition to the plan. Raises MesetaError if the plan has
    other ranks, hosts or tables.
    """
    _check_topology(plan, topology)
    cost_model = cost_model or documented_cost_model(topology.device)
    loads = loads or WorkloadLoads(workload)
    if unknown := [entry.table for entry in plan.tables if entry.table not in loads.table_index]:
        raise MesetaError(f"predict: the plan places table {unknown[0]!r}, which the workload does not have")
    storage = None if run is None else run.storage
    room = CacheOptions(default_share=cost_model.tiers.cached_share) if storage is None else CacheOptions(storage)
    placement = Placement.from_plan(plan, loads, topology.devices_per_host, room)
    sharded = _sharded_loads(loads, placement, cost_model.cache.cache_bytes)
    replicated = loads.shard_loads(placement.replicated)
    lookup, update = _operator_seconds_by_rank(placement, sharded, replicated, loads, cost_model, topology)
    transfers = step_transfers(workload, plan, plan.num_ranks, topology.devices_per_host)
    batch = PlanLoads(placement, sharded, replicated, loads, transfers, topology.device == "cpu")
    exchanged = collectives(transfers, placement, sharded, replicated, cost_model.exchange)
    dense_s = dense_seconds(workload, topology, cost_model)
    sorted_ids = float((sharded.num_ids * (placement.row_parts > 1)).sum()) / plan.num_ranks
    each_s = [_transfer_cost(collective, cost_model, topology, sorted_ids) for collective in exchanged]
    step_s, hidden_s = _step_seconds(workload, (lookup, update), dense_s, each_s)
    max_reads_per_s = None if storage is None else storage.max_reads_per_s
    disk_row_s = disk_seconds(cost_model, sharded, topology.devices_per_host, max_reads_per_s)
    disk_s = placement.sum_by_rank(sharded.tier_misses * disk_row_s)
    seconds: dict[StepComponent, Floats] = {name: np.zeros(plan.num_ranks) for name in STEP_COMPONENTS}
    # Disks are read one batch ahead, so only disk time beyond the step is exposed.
    seconds |= {"lookup": lookup + np.maximum(disk_s - step_s, 0.0), "table_update": update}
    seconds["dense"] = seconds["dense"] + dense_s
    exposed_s = [one.exposed_s(hidden) for one, hidden in zip(each_s, hidden_s, strict=True)]
    for collective, exposed in zip(exchanged, exposed_s, strict=True):
        seconds[collective.component] = seconds[collective.component] + exposed
    return Prediction(
        seconds=seconds,
        step_s=max(step_s, float(disk_s.max(initial=0.0))),
        bottleneck=int((lookup + update).argmax()),
        memory_bytes=memory_bytes(batch, run),
        collectives=exchanged,
        collective_s=tuple(one.seconds for one in each_s),
        link_s=tuple(one.link_s for one in each_s),
        exposed_s=tuple(
            np.maximum(collective - one.packing_s, 0.0) for collective, one in zip(exposed_s, each_s, strict=True)
        ),
        disk_s=disk_s,
        cache_misses=_cache_misses(workload, placement, sharded),
    )


def _sharded_loads(loads: WorkloadLoads, placement: Placement, cache_bytes: float) -> ShardLoads:
    pieces, owner = placement.sharded, placement.owner
    held = loads.hardware_cached_samples(pieces, owner, placement.num_ranks, cache_bytes)
    rank_bytes = placement.sum_by_rank(loads.stored_bytes(pieces)) + loads.stored_bytes(placement.replicated).sum()
    of_owner = {"hardware_cached_samples": held[owner], "rank_bytes": rank_bytes[owner]}
    return loads.shard_loads(pieces, **of_owner, num_ranks=placement.num_ranks)


def _cache_misses(workload: Workload, placement: Placement, sharded: ShardLoads) -> dict[str, float]:
    is_far = np.isin(sharded.tier_index, OFFLOADED_TIER_INDICES)
    numbers, misses = placement.sharded.table[is_far], sharded.tier_misses[is_far]
    return {workload.tables[number].name: float(misses[numbers == number].sum()) for number in np.unique(numbers)}


def _transfer_cost(
    collective: Collective, cost_model: CostModel, topology: Topology, sorted_ids: float
) -> TransferCost:
    """Predict the seconds of a collective on links, and for packing, codecs and sorting `sorted_ids` ids by owner."""
    link_s = collective.seconds(cost_model, topology) * collective_correction(cost_model, topology, collective)
    spent = link_s + _packing_seconds(collective, cost_model) + collective.codec_s
    if collective.name == "ids":
        spent = spent + cost_model.exchange.bucket_id_s * sorted_ids
    # All-reduces encode in their own lane, so encoding counts as link time.
    return TransferCost(
        collective.name, spent, link_s + collective.codec_s if collective.name in ALL_REDUCES else link_s
    )


def _step_seconds(
    workload: Workload, computed: tuple[Floats, Floats], dense_s: float, sent: Sequence[TransferCost]
) -> tuple[float, Sequence[float]]:
    # Without overlap, a step is the slowest rank's lookup and update, the dense part, and each collective at its
    # slowest rank. With overlap, it is the longest cycle of the schedule, but never longer than that sum.
    step_s = float((computed[0] + computed[1]).max() + dense_s)
    for one in sent:
        step_s += float(one.seconds.max())
    schedule = schedule_for(workload, [one.name for one in sent])
    if schedule is not None:
        overlapped = OverlappedStep.from_schedule(schedule, computed, dense_op_seconds(workload, dense_s), sent)
        if overlapped.step_s < step_s:
            return overlapped.step_s, overlapped.hidden_s
    return step_s, [0.0] * len(sent)


def _check_topology(plan: Plan, topology: Topology) -> None:
    if plan.num_ranks != topology.num_ranks:
        raise MesetaError(
            f"predict: the plan is for {plan.num_ranks} ranks, but the topology has {topology.num_ranks}; "
            "create a new plan"
        )
    if plan.devices_per_host not in (None, topology.devices_per_host):
        raise MesetaError(
            f"predict: the plan is for hosts of {plan.devices_per_host} devices, but the topology has "
            f"{topology.devices_per_host}; create a new plan"
        )


def replica_seconds(
    loads: WorkloadLoads, placement: Placement, cost_model: CostModel, topology: Topology
) -> tuple[Floats, Floats]:
    """Return the seconds of (lookup, update) that each rank spends on each replicated shard, both [m]."""
    pieces, ranks = placement.replicated, placement.num_ranks
    batch = loads.workload.batch_size
    # A rank looks up and adds gradients for the rows of its samples. It clears and reads the whole gradient, and
    # updates the rows that the global batch has touched.
    local = loads.shard_loads(pieces, num_samples=batch / ranks)
    lookup_s, add_s = operator_seconds(cost_model, local)
    if ranks == 1:
        return lookup_s, add_s
    global_loads = loads.shard_loads(pieces)
    update = cost_model.update
    gradient_bytes = global_loads.num_rows * (global_loads.num_columns + 1) * global_loads.element_bytes
    row_bytes = (
        global_loads.row_bytes + global_loads.state_bytes + global_loads.num_columns * global_loads.element_bytes
    )
    number_s = np.array([update.element_seconds(name) for name in global_loads.optimizers])[
        global_loads.optimizer_index
    ]
    step_s = global_loads.num_distinct_rows * (
        update.row_s + update.miss_s + row_bytes * update.miss_byte_s + global_loads.num_columns * number_s
    )
    clear_s = gradient_bytes * cost_model.exchange.copy_byte_s
    return lookup_s, np.where(global_loads.is_frozen, 0.0, add_s + step_s + clear_s)


def _operator_seconds_by_rank(
    placement: Placement,
    sharded: ShardLoads,
    replicated: ShardLoads,
    loads: WorkloadLoads,
    cost_model: CostModel,
    topology: Topology,
) -> tuple[Floats, Floats]:
    totals = rank_seconds(cost_model, sharded, placement.owner, placement.num_ranks)
    if len(replicated.num_ids):
        extra = replica_seconds(loads, placement, cost_model, topology)
        calls = (cost_model.lookup.call_s, 2 * cost_model.update.call_s)
        lookup, update = (
            total + extra_s.sum() + call for total, extra_s, call in zip(totals, extra, calls, strict=True)
        )
        return lookup, update
    return totals


def dense_seconds(workload: Workload, topology: Topology, cost_model: CostModel) -> float:
    """Return the seconds per rank for the matrix products of the dense part."""
    dense = workload.dense
    if not dense.flops_per_sample:
        return 0.0
    cost, samples = cost_model.dense, workload.batch_size / topology.num_ranks
    flops_per_s = cost.bfloat16_flops_per_s if dense.dtype == "bfloat16" else cost.float32_flops_per_s
    return dense.flops_per_sample * samples / flops_per_s + cost.call_s


def _packing_seconds(collective: Collective, cost_model: CostModel) -> Floats:
    num_bytes = (
        collective.sent_intra_host
        + collective.sent_inter_host
        + collective.received_intra_host
        + collective.received_inter_host
    )
    return cost_model.exchange.copy_byte_s * num_bytes
