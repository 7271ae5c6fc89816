"""Estimates of the costs of shards and replicas, which the search adds up for any assignment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.exchange import (
    OF_HOSTS,
    PAIR_ITEMS,
    REPLICA_ITEMS,
    UNPARTITIONED,
    call_seconds,
    chain_factor,
    codec_seconds,
    count_peers,
    pair_bytes,
    select_links,
    transfer_part_bytes,
)
from meseta.planner.cost.loads import ShardArrays, ShardLoads, WorkloadLoads
from meseta.planner.cost.memory import (
    SORT_BYTES_PER_ID,
    RunBytes,
    fixed_bytes,
    received_bytes,
    replica_gradient_bytes,
    row_gradient_bytes,
    stored_bytes,
)
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import dense_seconds, replica_seconds
from meseta.planner.cost.schedule import (
    HOST_POOLED_BAGS,
    MERGED_TRANSFERS,
    PACKING_PREFIX,
    Schedule,
    dense_op_seconds,
    schedule_for,
)
from meseta.planner.search.assignment import Floats, Ints, Mask, ShardingOptions, StepPaths
from meseta.planner.search.partition import COMPUTE_COMPONENTS, DurationTerms, find_paths
from meseta.spec import CostModel, Topology, Workload
from meseta.spec.codecs import (
    AllReduceAlgorithm,
    CollectiveKind,
    CrossHostAlgorithm,
    ExchangeAlgorithm,
    traffic_factors,
)
from meseta.spec.tiers import MEMORIES
from meseta.spec.transfer import GRADIENT_TRANSFERS, ROW_STATISTICS, TrafficUnit, Transfer, TransferPart, step_transfers

# With a hierarchical exchange, `embeddings` are the ids sent between hosts, because all bags and rows belong to the two
# components after it.
COST_COMPONENTS = ("compute", "ids", "embeddings", "partial bags", "summed bags", "row statistics")
"""Components of a step without overlap, each of which ends with its slowest rank."""
OPTIONAL_COSTS = ("partial bags", "row statistics", "replicas", "owners", "embeddings")
"""Costs that apply only if some table needs them: collectives, calls, and inter-host latency of collectives."""
NUM_AVOIDABLE = 3
"""Number of leading `OPTIONAL_COSTS` that the search also tries to avoid."""


ByteCost = tuple[int, float, float]
"""Tuple of component index, seconds per byte for the owner of a shard, and seconds per byte for each rank."""
AlgorithmPair = tuple[ExchangeAlgorithm | None, CrossHostAlgorithm | None]
"""Exchange algorithms between hosts, for rows and for all-reduces. `None` if there is no choice, see
`meseta.spec.Plan`."""


@dataclass(frozen=True, kw_only=True)
class ShardPartitioning:
    """Partitioning of the table of each shard [n]. See `meseta.planner.cost.exchange.Partitioning`."""

    host_row_parts: Ints  # [n]
    column_parts: Ints  # [n]
    host_column_parts: Ints | Floats  # [n]
    row_parts: Ints
    """Number of row ranges that have one owner."""
    max_host_row_parts: Ints | None = None
    """Upper bound of `host_row_parts`. `None` if `host_row_parts` is exact."""
    max_host_column_parts: Ints | None = None
    """Upper bound of `host_column_parts`. `None` if `host_column_parts` is exact."""
    min_shards_in_host: Ints | int = 1
    """Lower bound of the number of shards of the table on the same host, including this one."""

    def min_share(self, each: TrafficUnit) -> Floats | float:
        """Return the ratio between the minimum and the expected amount of a unit that is counted per host."""
        if each in OF_HOSTS and self.max_host_column_parts is not None:
            return np.asarray(self.host_column_parts, np.float64) / self.max_host_column_parts
        if each == "whole bag number" and self.max_host_row_parts is not None:
            return np.asarray(self.host_row_parts, np.float64) / np.maximum(self.max_host_row_parts, 1)
        return 1.0


@dataclass(frozen=True, kw_only=True)
class ShardCosts:
    """Costs of n shards in seconds and bytes."""

    seconds: Floats  # [n, K]: on the owner
    min_s: Floats
    """Lower bounds of the seconds of each shard [n, 2, L]: added to the total of all ranks, and on its owner. L is K
    with overlap, and 1 otherwise."""
    common_seconds: Floats  # [n, K]: on all ranks
    rank_bytes: Ints  # [n]: on the device of the owner
    host_bytes: Ints
    """Bytes of DRAM and disk on the host of the owner [n, 2]."""
    common_bytes: Ints  # [n]: on all devices


# Estimates agree with `predict`, with three approximations: the content of hardware caches, and the bytes that a rank
# holds, are those of an average rank. In hierarchical exchanges, the shards of a host are spread evenly over its ranks.
class ShardCostEstimator:
    """Estimator of shard costs for one workload and topology."""

    def __init__(
        self,
        loads: WorkloadLoads,
        topology: Topology,
        cost_model: CostModel,
        held_samples: float | None = None,
        run: RunBytes | None = None,
        algorithms: AlgorithmPair = (None, None),
    ) -> None:
        """Create an estimator.

        Args:
            loads: Workload.
            topology: Hosts, devices and links.
            cost_model: Constants of the devices.
            held_samples: Number of samples whose rows fit in the hardware cache. `None` derives it for an average rank.
            run: Memory that a run needs in addition to its plan.
            algorithms: Exchange algorithms between hosts.
        """
        self.algorithms = algorithms
        self.loads, self.topology, self.cost_model, self.run = loads, topology, cost_model, run or RunBytes()
        whole = loads.whole_tables()
        owners, cache_bytes = np.zeros(len(whole.table), np.int64), cost_model.cache.cache_bytes * topology.num_ranks
        self._hardware_cached_samples = (
            loads.hardware_cached_samples(whole, owners, 1, cache_bytes)[0] if held_samples is None else held_samples
        )
        self._rank_bytes = loads.stored_bytes(whole).sum() / topology.num_ranks
        ranks, per_host = topology.num_ranks, topology.devices_per_host
        self.transfers = step_transfers(loads.workload, None, ranks, per_host, *algorithms)
        self.is_hierarchical = algorithms[0] == "hierarchical" and 1 < per_host < ranks
        self.schedules = overlap_schedules(loads.workload, self.transfers, self.is_hierarchical)
        """Schedules of a step with the optional costs that each requires, or `None` without overlap."""
        self.components = COST_COMPONENTS if self.schedules is None else overlap_components(self.transfers)
        """Names of the K components. With overlap, they are names of schedules."""
        inside, across = select_links(cost_model, topology, False)
        self._copy_byte_s = cost_model.exchange.copy_byte_s
        # Intra-host and inter-host links transfer at the same time.
        self._owner_byte_s = max((per_host - 1) / inside.bytes_per_s, (ranks - per_host) / across.bytes_per_s) / ranks
        self._intra_host_byte_s, self._inter_host_byte_s = 1.0 / inside.bytes_per_s, 1.0 / across.bytes_per_s

    def shard_costs(self, pieces: ShardArrays, cuts: ShardPartitioning) -> ShardCosts:
        """Return the costs of shards with one owner."""
        loads, model, ranks = self.loads, self.cost_model, self.topology.num_ranks
        cache_bytes, n = model.cache.cache_bytes, len(pieces.table)
        held = self._hardware_cached_samples
        alone = loads.hardware_cached_samples(pieces, np.arange(n), n, cache_bytes) if n else np.zeros(0)
        load = loads.shard_loads(pieces, hardware_cached_samples=held, rank_bytes=self._rank_bytes, num_ranks=ranks)
        both = operator_seconds(model, load)
        least = loads.shard_loads(
            pieces, hardware_cached_samples=np.maximum(alone, held), rank_bytes=loads.stored_bytes(pieces)
        )
        least_of_both = operator_seconds(model, least)
        owner_s, common = (np.zeros((n, len(self.components))) for _ in range(2))
        saved_s, shared_s = self._add_exchange_seconds(load, cuts, owner_s, common)
        # Disk time is hidden up to the duration of the step. It is added here, so that tables with many misses stay
        # in memory, but it is not part of lower bounds.
        disk_s = load.tier_misses * disk_seconds(model, load, self.topology.devices_per_host)
        self._set_compute_seconds(owner_s, (both[0] + disk_s, both[1]))
        least_s = self._min_seconds(owner_s, both, least_of_both) - saved_s
        received, answered = received_bytes(self.transfers, load, cuts, ranks)
        device, host, disk = (stored_bytes(load, memory, is_cpu=self.topology.device == "cpu") for memory in MEMORIES)
        buffers = SORT_BYTES_PER_ID * load.num_ids + row_gradient_bytes(loads.workload, load)
        if ranks > 1:
            buffers = buffers + 2 * received + 8 * load.num_lengths + answered
        common_bytes = (received + answered) / ranks
        return ShardCosts(
            seconds=owner_s,
            min_s=np.stack([least_s, least_s - shared_s], axis=1),
            common_seconds=common,
            rank_bytes=_round_up(device + buffers),
            host_bytes=np.stack([_round_up(host), _round_up(disk)], axis=1),
            common_bytes=_round_up(common_bytes),
        )

    def _add_exchange_seconds(
        self, load: ShardLoads, cuts: ShardPartitioning, owner_total_s: Floats, common: Floats
    ) -> tuple[Floats, Floats]:
        """Add the seconds of transfers to `owner_total_s` and `common`. Returns (savable seconds, seconds that other
        ranks of the host may share), both [n, L]."""
        rows_are_cut, ranks, per_host = cuts.row_parts > 1, self.topology.num_ranks, self.topology.devices_per_host
        width = 1 if self.schedules is None else len(self.components)
        (saved_s, shared_s), cost = np.zeros((2, len(load.num_ids), width)), self.cost_model.exchange
        for transfer in self.transfers:
            for part in transfer.parts:
                if part.collective in _COMPONENT_INDEX and part.unit not in PAIR_ITEMS:
                    num_bytes = transfer_part_bytes(part, load, cuts, ranks)
                    for component, owner_s, common_s in self._byte_costs(transfer, part):
                        owner_total_s[:, component] += num_bytes * owner_s
                        common[:, component] += num_bytes * common_s
                        column = component if width > 1 else 0
                        if part.collective == "hosts":
                            least = num_bytes * owner_s * cuts.min_share(part.unit)
                            saved_s[:, column] += num_bytes * owner_s - least
                            shared_s[:, column] += least * (1.0 - cuts.min_shards_in_host / per_host)
                    if part.collective == "host":  # A rank that owns more requests less from others.
                        shared_s[:, column] += num_bytes * self._copy_byte_s * sent_share("host", ranks, per_host)
            if transfer.name == "ids":
                column = 1 if self.schedules is None else self.components.index(PACKING_PREFIX + "ids")
                common[:, column] += cost.bucket_id_s * load.num_ids * rows_are_cut / ranks
        return saved_s, shared_s

    def _byte_costs(self, transfer: Transfer, part: TransferPart) -> list[ByteCost]:
        """Return the components of the bytes of a part: links and packing if they are separate, otherwise one
        component."""
        ranks, cost = self.topology.num_ranks, self.cost_model.exchange
        owner_s, common_s = self._byte_s(part.collective)
        holder_s, askers_s = codec_seconds(part, transfer.sends_to_owners, cost, self.topology.num_hosts)
        if self.schedules is None:
            component = self._component(transfer, part.collective)
            return [(component, owner_s + holder_s, common_s + askers_s / ranks)]
        link_s, first = self._link_byte_s(part.collective), MERGED_TRANSFERS.get(transfer.name, transfer.name)
        link, packing = self.components.index(first), self.components.index(PACKING_PREFIX + first)
        return [(link, link_s, 0.0), (packing, owner_s - link_s + holder_s, common_s + askers_s / ranks)]

    def _component(self, transfer: Transfer, way: CollectiveKind) -> int:
        if transfer.component != "input_dist":
            return _COMPONENT_INDEX[way]
        return COST_COMPONENTS.index("embeddings" if self.is_hierarchical and way == "hosts" else "ids")

    # Lookup and update are separate components if something overlaps.
    def _set_compute_seconds(self, components: Floats, both: tuple[Floats, Floats]) -> None:
        components[:, 0] = both[0] + both[1]
        if self.schedules is not None:
            components[:, 1], components[:, 2] = both

    def _min_seconds(self, owner_s: Floats, both: tuple[Floats, Floats], least: tuple[Floats, Floats]) -> Floats:
        """Return lower bounds [n, L] of `owner_s` [n, K], where lookup and update take the seconds `least`."""
        # The update alone has the lower bound 0.
        together = np.minimum(least[0] + least[1], both[0] + both[1])
        if self.schedules is None:
            added: Floats = together + owner_s[:, 1:].sum(axis=1)
            return added[:, None]
        return np.column_stack([together, np.minimum(least[0], both[0]), np.zeros(len(owner_s)), owner_s[:, 3:]])

    def unoverlapped_seconds(self, seconds: Floats) -> Floats:
        """Return the total seconds [n] of components [n, K] without overlap."""
        if self.schedules is None:
            return seconds.sum(axis=1)
        return seconds[:, 0] + seconds[:, len(COMPUTE_COMPONENTS) :].sum(axis=1)

    def step_paths(self, options: ShardingOptions) -> tuple[StepPaths, float]:
        """Return the paths of a step with these options, and the seconds of a step without tables."""
        assert self.schedules is not None
        uses = self._optional_seconds_by_name()
        durations = DurationTerms(
            components=self.components,
            fixed_s=self._fixed_seconds_by_name(),
            optional_s=[uses[name] for name in OPTIONAL_COSTS],
        )
        averages = options.total_seconds / self.topology.num_ranks + options.common_seconds
        starts = np.searchsorted(options.unit_index, np.arange(options.num_units))
        if not len(starts):
            expected = np.zeros((1, len(self.components)))
        else:
            whole = self.unoverlapped_seconds(averages)
            least = np.minimum.reduceat(whole, starts)
            cheapest = np.unique(options.unit_index[whole == least[options.unit_index]], return_index=True)[1]
            chosen = np.flatnonzero(whole == least[options.unit_index])[cheapest]
            sizes = np.diff(np.append(starts, len(whole)))
            mean = (np.add.reduceat(averages, starts) / sizes[:, None]).sum(axis=0)
            expected = np.stack([averages[chosen].sum(axis=0), mean])
        return find_paths(self.schedules, durations, expected, (averages, starts))

    def _byte_s(self, way: CollectiveKind) -> tuple[float, float]:
        """Return the seconds per byte for the owner of a shard, and for each rank."""
        copy_s, ranks, per_host = self._copy_byte_s, self.topology.num_ranks, self.topology.devices_per_host
        if way == "owners":
            return self._owner_byte_s + copy_s * (ranks - 2) / ranks, copy_s / ranks
        if way == "hosts":
            hosts = self.topology.num_hosts
            return (self._inter_host_byte_s * (hosts - 1) + copy_s * (hosts - 2)) / hosts, copy_s / ranks
        link_s = self._intra_host_byte_s if way == "host" or self.topology.num_hosts == 1 else self._inter_host_byte_s
        return (link_s + 2.0 * copy_s) * sent_share(way, ranks, per_host), 0.0

    def _link_byte_s(self, way: CollectiveKind) -> float:
        if way == "owners":
            return self._owner_byte_s
        if way == "hosts":
            return self._inter_host_byte_s * (self.topology.num_hosts - 1) / self.topology.num_hosts
        link_s = self._intra_host_byte_s if way == "host" or self.topology.num_hosts == 1 else self._inter_host_byte_s
        return link_s * sent_share(way, self.topology.num_ranks, self.topology.devices_per_host)

    def sent_bytes(self, pieces: ShardArrays, cuts: ShardPartitioning, replicas: ShardArrays) -> dict[str, float]:
        """Return the bytes that all ranks send for these shards and replicas, by table transfer."""
        totals: dict[str, float] = {}
        ranks, per_host = self.topology.num_ranks, self.topology.devices_per_host
        sharded, everywhere = self.loads.shard_loads(pieces, num_ranks=ranks), self.loads.shard_loads(replicas)
        for transfer in self.transfers:
            for part in transfer.parts if transfer.depends_on_plan else ():
                if part.unit in PAIR_ITEMS:
                    num_bytes = ranks * pair_bytes(part, ranks, per_host)
                else:
                    is_replica = part.unit in REPLICA_ITEMS
                    load, cut = (everywhere, UNPARTITIONED) if is_replica else (sharded, cuts)
                    num_bytes = float(transfer_part_bytes(part, load, cut, ranks).sum())
                share = sent_share(part.collective, ranks, per_host)
                totals[transfer.name] = totals.get(transfer.name, 0.0) + share * num_bytes
        return totals

    def replica_costs(self, pieces: ShardArrays) -> ShardCosts:
        """Return the costs of replicated shards, all of which are common costs."""
        model, topology, ranks = self.cost_model, self.topology, self.topology.num_ranks
        n, nothing = len(pieces.table), np.zeros(0, np.int64)
        empty = ShardArrays(*[nothing] * 7)
        placement = Placement(
            empty, nothing, nothing, nothing, nothing, nothing, pieces, ranks, topology.devices_per_host
        )
        common = np.zeros((n, len(self.components)))
        self._set_compute_seconds(common, replica_seconds(self.loads, placement, model, topology))
        load = self.loads.shard_loads(pieces)
        gradients = replica_gradient_bytes(self.transfers, load)
        for transfer in self.transfers:
            if transfer.name == "replicas":
                amounts = [transfer_part_bytes(part, load, UNPARTITIONED, ranks) for part in transfer.parts]
                link_s, packing_s, codec_s = self._replicated_seconds(transfer, amounts)
                if self.schedules is None:
                    common[:, 5] = link_s + packing_s + codec_s
                else:
                    common[:, self.components.index("replicas")] = link_s + codec_s
                    common[:, self.components.index(PACKING_PREFIX + "replicas")] = packing_s
        return ShardCosts(
            seconds=np.zeros((n, len(self.components))),
            min_s=np.zeros((n, 2, 1)),
            common_seconds=common,
            rank_bytes=np.zeros(n, np.int64),
            host_bytes=np.zeros((n, 2), np.int64),
            common_bytes=_round_up(load.stored_bytes + gradients + SORT_BYTES_PER_ID * load.num_ids / ranks),
        )

    def fixed_seconds(self) -> float:
        """Return the seconds of every plan: dense part and its transfers, and minimum latencies and headers of table
        transfers."""
        workload = self.loads.workload
        return dense_seconds(workload, self.topology, self.cost_model) + sum(
            s for _, s in self._fixed_transfer_seconds()
        )

    def _fixed_transfer_seconds(self) -> Iterator[tuple[str, float]]:
        """Yield (name, seconds) of the transfers of every plan, with names of schedules."""
        for transfer in self.transfers:
            name = MERGED_TRANSFERS.get(transfer.name, transfer.name)
            if not transfer.depends_on_plan:
                is_far = transfer.parts[0].collective not in ("host gather", "host scatter")
                yield name, self._call_s(transfer, crosses_hosts=is_far)
                amounts = [np.array(float(part.num_bytes)) for part in transfer.parts]
                link_s, packing_s, codec_s = self._replicated_seconds(transfer, amounts)
                yield name, float(link_s + codec_s)
                yield PACKING_PREFIX + name, float(packing_s)
            elif self._is_unconditional(transfer):
                headers = [part for part in transfer.parts if part.unit in PAIR_ITEMS]
                yield name, self._call_s(transfer, crosses_hosts=True) if headers else self._min_call_s(transfer)
                for part in headers:
                    on_links_s = self._header_link_seconds(part)
                    yield name, on_links_s
                    yield PACKING_PREFIX + name, self._header_seconds(part) - on_links_s

    def _fixed_seconds_by_name(self) -> dict[str, float]:
        workload = self.loads.workload
        totals = dense_op_seconds(workload, dense_seconds(workload, self.topology, self.cost_model))
        for name, seconds in self._fixed_transfer_seconds():
            totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def _call_s(self, transfer: Transfer, *, crosses_hosts: bool) -> float:
        """Return the latency and peer time of a transfer. `crosses_hosts` states whether it includes ranks of other
        hosts."""
        topology, per_host = self.topology, self.topology.devices_per_host
        call = _TransferCall(transfer.algorithm, count_peers(transfer, topology.num_ranks, per_host))
        both = select_links(self.cost_model, topology, transfer.is_reduction)
        return transfer.num_calls * call_seconds(call, both, topology, crosses_hosts and call.num_peers[1] > 0)

    def _min_call_s(self, transfer: Transfer) -> float:
        return min(self._call_s(transfer, crosses_hosts=True), self._call_s(transfer, crosses_hosts=False))

    def _is_unconditional(self, transfer: Transfer) -> bool:
        if self.is_hierarchical:
            return transfer.name not in ("replicas", "row statistics")
        return any(part.collective == "owners" for part in transfer.parts)

    def _header_seconds(self, part: TransferPart) -> float:
        ranks = self.topology.num_ranks
        owner_s, common_s = self._byte_s(part.collective)
        return pair_bytes(part, ranks, self.topology.devices_per_host) * (owner_s + ranks * common_s)

    def _header_link_seconds(self, part: TransferPart) -> float:
        num_bytes = pair_bytes(part, self.topology.num_ranks, self.topology.devices_per_host)
        return num_bytes * self._link_byte_s(part.collective)

    def _replicated_seconds(self, transfer: Transfer, amounts: Sequence[Floats]) -> tuple[Floats, Floats, Floats]:
        """Return the seconds for bytes that all ranks have, without latency, as (links, packing, codecs)."""
        ranks, per_host, hosts = self.topology.num_ranks, self.topology.devices_per_host, self.topology.num_hosts
        inside, across = select_links(self.cost_model, self.topology, transfer.is_reduction)
        near = far = codec_s = np.zeros(())
        for part, num_bytes in zip(transfer.parts, amounts, strict=True):
            shares = traffic_factors(part.collective, ranks, per_host, min(1, hosts - 1))
            near, far = near + shares[0] * num_bytes, far + shares[1] * num_bytes
            codec_s = codec_s + num_bytes * codec_seconds(part, True, self.cost_model.exchange, hosts)[0]
        near_s, far_s = near / inside.bytes_per_s, far / across.bytes_per_s
        if transfer.algorithm == "chain":
            far_s = far_s * chain_factor(hosts)
        spent = near_s + far_s if transfer.algorithm in ("cross_host", "chain") else np.maximum(near_s, far_s)
        return np.asarray(spent), np.asarray(2 * (near + far) * self._copy_byte_s), np.asarray(codec_s)

    def optional_costs(self, cuts: ShardPartitioning, pieces: ShardArrays) -> Ints:
        """Return 1 for each shard and optional cost that it needs, otherwise 0 [n, len(OPTIONAL_COSTS)]."""
        num_statistics = np.array([ROW_STATISTICS.get(name, (0, 0))[0] for name in self.loads.optimizers], np.int64)
        statistics = (cuts.column_parts > 1) & (num_statistics[self.loads.optimizer_index[pieces.table]] > 0)
        read = self.loads.num_features[pieces.table] > 0
        none = np.zeros_like(statistics)
        partial = none if self.is_hierarchical else cuts.host_row_parts > 0
        return np.stack([partial, statistics, none, read, read & ~partial], axis=1).astype(np.int64)

    def optional_seconds(self) -> Floats:
        """Return the seconds of the optional costs in both directions [len(OPTIONAL_COSTS)]."""
        parts = self._optional_seconds_by_name()
        return np.array([float(sum(parts[name].values())) for name in OPTIONAL_COSTS])

    def _optional_seconds_by_name(self) -> dict[str, dict[str, float]]:
        lookup_s, update_s = self.cost_model.lookup.call_s, self.cost_model.update.call_s
        seconds_by_name: dict[str, dict[str, float]] = {name: {} for name in OPTIONAL_COSTS}
        seconds_by_name["owners"] = {"lookup": lookup_s, "table_update": update_s}
        if self.topology.num_ranks == 1:
            return seconds_by_name
        seconds_by_name["replicas"] = {"table_update": 2 * update_s, "lookup": lookup_s}

        def add(use: str, transfer: Transfer, seconds: float) -> None:
            name = MERGED_TRANSFERS.get(transfer.name, transfer.name)
            seconds_by_name[use][name] = seconds_by_name[use].get(name, 0.0) + seconds

        for transfer in self.transfers:
            far_s = self._call_s(transfer, crosses_hosts=True)
            if transfer.name in ("row statistics", "replicas"):
                add(transfer.name, transfer, far_s)
            elif transfer.depends_on_plan and not self._is_unconditional(transfer):
                add("partial bags", transfer, far_s)
            elif transfer.depends_on_plan and not any(part.unit in PAIR_ITEMS for part in transfer.parts):
                use = "owners" if transfer.component == "input_dist" else "embeddings"
                add(use, transfer, far_s - self._min_call_s(transfer))
        return seconds_by_name

    def fixed_memory_bytes(self) -> tuple[int, int]:
        """Return the bytes of each rank in addition to tables and their exchange, as (device, host)."""
        return fixed_bytes(self.loads, self.topology.num_ranks, self.run)


_COMPONENT_INDEX: dict[CollectiveKind, int] = {"owners": 2, "host": 3, "hosts": 4, "columns": 5}
"""Index in `COST_COMPONENTS` of each collective, except exchanges of ids."""


@dataclass(frozen=True)
class _TransferCall:
    algorithm: AllReduceAlgorithm | None
    num_peers: tuple[int, int]


def overlap_schedules(
    workload: Workload, transfers: Sequence[Transfer], is_hierarchical: bool
) -> list[tuple[Schedule, Mask]] | None:
    """Return the schedules of a step, or `None` if no transfer overlaps with computation.

    Each has the optional costs that it requires: none, sums of bags inside hosts, row statistics, or both.
    """
    schedules = []
    names = [transfer.name for transfer in transfers]
    partial = () if is_hierarchical else (HOST_POOLED_BAGS, GRADIENT_TRANSFERS[HOST_POOLED_BAGS])
    optional = {"partial bags": partial, "row statistics": ("row statistics",)}
    for needed in ((), ("partial bags",), ("row statistics",), ("partial bags", "row statistics")):
        if any(not set(optional[use]) & set(names) for use in needed):
            continue
        absent = {name for use, of_use in optional.items() if use not in needed for name in of_use}
        schedule = schedule_for(workload, [name for name in names if name not in absent])
        if schedule is None:
            return None
        schedules.append((schedule, np.isin(OPTIONAL_COSTS, needed)))
    return schedules


def overlap_components(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Return the names of the components of a step with overlap: lookup and update, and link and packing time of each
    table transfer."""
    names = dict.fromkeys(MERGED_TRANSFERS.get(one.name, one.name) for one in transfers if one.depends_on_plan)
    return (*COMPUTE_COMPONENTS, *(prefix + name for name in names for prefix in ("", PACKING_PREFIX)))


def sent_share(way: CollectiveKind, num_ranks: int, per_host: int) -> float:
    """Return the share of a shard's bytes that is sent to other ranks. For reductions, the total of all ranks."""
    hosts = num_ranks // per_host
    shares: dict[CollectiveKind, float] = {
        "owners": (num_ranks - 1) / num_ranks,
        "host": (per_host - 1) / per_host,
        "hosts": (hosts - 1) / hosts,
        "columns": 1.0,
    }
    return shares[way] if way in shares else num_ranks * sum(traffic_factors(way, num_ranks, per_host))


def _round_up(values: Floats) -> Ints:
    return np.ceil(values).astype(np.int64)
