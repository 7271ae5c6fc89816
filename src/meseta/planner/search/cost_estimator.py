"""Seconds and bytes of pieces and replicas that any assignment adds up: what `predict` says of a whole plan, per piece.

All but three parts of `predict` are sums over the pieces of a rank, so that the cost of an assignment follows from its
pieces. The three: the rows that a cache keeps, which all pieces of a rank share, and the bytes that a rank holds are
taken as of an average rank; and the pieces of a host are taken to lie evenly on its ranks where those hand on what is
the host's. Beside its seconds a piece has what it takes at least, wherever its rank and its host have the others.
"""

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
    stored_bytes,
)
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.cost.overlapped_step import dense_op_seconds, schedule_for
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import dense_seconds, replica_seconds
from meseta.planner.cost.schedule import HOST_POOLED_BAGS, MERGED_TRANSFERS, PACKING_PREFIX, Schedule
from meseta.planner.search.assignment import Floats, Ints, Mask, ShardingOptions, StepPaths
from meseta.planner.search.paths import COMPUTE_COMPONENTS, DurationTerms, find_paths
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

COST_COMPONENTS = ("compute", "ids", "embeddings", "partial bags", "summed bags", "row statistics")
"""What every rank does in step with the others; the slowest ends it. With two levels 'embeddings' are the ids that
cross hosts, since all bags and rows are of the two behind it."""
OPTIONAL_COSTS = ("partial bags", "row statistics", "replicas", "owners", "embeddings")
"""What takes place only where some table needs it: collectives, calls, and bytes between hosts in those that all steps
have."""
NUM_AVOIDABLE = 3
"""The first of USES, without which a search tries to do."""


ByteCost = tuple[int, float, float]
"""A component, and the seconds of a byte there: of the rank that has the piece, and of every rank."""
AlgorithmPair = tuple[ExchangeAlgorithm | None, CrossHostAlgorithm | None]
"""Which way rows, and sums, take between hosts; None: where nobody chooses, see `meseta.spec.Plan`."""


@dataclass(frozen=True, kw_only=True)
class ShardPartitioning:
    """How the table of each piece is cut, [n] each."""

    host_row_parts: Ints
    """Row ranges in the piece's host, of schemes that sum bags there; else 0."""
    column_parts: Ints
    """Ranges of columns."""
    host_column_parts: Ints | Floats
    """Pieces of the piece's host that hold columns of the same rows."""
    row_parts: Ints
    """Ranges of rows that lie on one rank."""
    max_host_row_parts: Ints | None = None
    """Row ranges that the piece's host may have at most; None: it has `host_parts`."""
    max_host_column_parts: Ints | None = None
    """The same of `host_columns`."""
    min_shards_in_host: Ints | int = 1
    """Pieces of the table that are sure to lie in one host, this one among them."""

    def min_share(self, each: TrafficUnit) -> Floats | float:
        """What a piece has at least of the host's, over what `host_parts` and `host_columns` say."""
        if each in OF_HOSTS and self.max_host_column_parts is not None:
            return np.asarray(self.host_column_parts, np.float64) / self.max_host_column_parts
        if each == "whole bag number" and self.max_host_row_parts is not None:
            return np.asarray(self.host_row_parts, np.float64) / np.maximum(self.max_host_row_parts, 1)
        return 1.0


@dataclass(frozen=True, kw_only=True)
class ShardCosts:
    """Of n pieces."""

    seconds: Floats
    """[n, K]: of the rank that holds the piece."""
    min_s: Floats
    """[n, 2, L]: at least, were the piece alone on its rank: what all ranks together have more to do, and the rank that
    holds it; L is K where something is hidden, else 1, of all together."""
    common_seconds: Floats
    """[n, K]: of every rank."""
    rank_bytes: Ints
    """[n]: of the device."""
    host_bytes: Ints
    """[n, 2]: of DRAM and disk of the host."""
    common_bytes: Ints
    """[n]: of every device."""


class ShardCostEstimator:
    """Prices of one workload on one set of machines."""

    def __init__(
        self,
        loads: WorkloadLoads,
        topology: Topology,
        cost_model: CostModel,
        held_samples: float | None = None,
        run: RunBytes | None = None,
        algorithms: AlgorithmPair = (None, None),
    ) -> None:
        """`held_samples`: for how many a cache keeps rows; None: as on a rank with an equal part of all tables. `run`:
        what a run adds to the memory of its plan. `algorithms`: which way rows and sums take between hosts."""
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
        """All that a plan may need."""
        self.is_hierarchical = algorithms[0] == "hierarchical" and 1 < per_host < ranks
        self.schedules = overlap_schedules(loads.workload, self.transfers, self.is_hierarchical)
        """Where something is hidden: of a step, and of one that uses more; with what of USES each needs."""
        self.components = COST_COMPONENTS if self.schedules is None else overlap_components(self.transfers)
        """K of them; where something is hidden, the names that a schedule has for their seconds, by way."""
        inside, across = select_links(cost_model, topology, False)
        self._copy_byte_s = cost_model.exchange.copy_byte_s
        self._owner_byte_s = max((per_host - 1) / inside.bytes_per_s, (ranks - per_host) / across.bytes_per_s) / ranks
        self._intra_host_byte_s, self._inter_host_byte_s = 1.0 / inside.bytes_per_s, 1.0 / across.bytes_per_s

    def shard_costs(self, pieces: ShardArrays, cuts: ShardPartitioning) -> ShardCosts:
        """Price pieces that lie on one rank each."""
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
        own, common = (np.zeros((n, len(self.components))) for _ in range(2))
        saved_s, shared_s = self._add_exchange_seconds(load, cuts, own, common)
        # What disks take is hidden behind the step, up to its length: here it is added, so that tables of many misses
        # stay near, and left out of what a piece takes at least.
        disk_s = load.tier_misses * disk_seconds(model, load, self.topology.devices_per_host)
        self._set_compute_seconds(own, (both[0] + disk_s, both[1]))
        least_s = self._min_seconds(own, both, least_of_both) - saved_s
        wire, answered = received_bytes(self.transfers, load, cuts, ranks)
        device, host, disk = (stored_bytes(load, memory, is_cpu=self.topology.device == "cpu") for memory in MEMORIES)
        buffers = SORT_BYTES_PER_ID * load.num_ids
        if ranks > 1:
            buffers = buffers + 2 * wire + 8 * load.num_lengths + answered
        common_bytes = (wire + answered) / ranks
        return ShardCosts(
            seconds=own,
            min_s=np.stack([least_s, least_s - shared_s], axis=1),
            common_seconds=common,
            rank_bytes=_round_up(device + buffers),
            host_bytes=np.stack([_round_up(host), _round_up(disk)], axis=1),
            common_bytes=_round_up(common_bytes),
        )

    def _add_exchange_seconds(
        self, load: ShardLoads, cuts: ShardPartitioning, own: Floats, common: Floats
    ) -> tuple[Floats, Floats]:
        """Add the seconds of the transfers: their bytes, at what a byte takes on its way. Returns [n, L] and [n, L]:
        what of them may be less, and what other ranks of the host may take on."""
        rows_are_cut, ranks, per_host = cuts.row_parts > 1, self.topology.num_ranks, self.topology.devices_per_host
        width = 1 if self.schedules is None else len(self.components)
        (saved_s, shared_s), cost = np.zeros((2, len(load.num_ids), width)), self.cost_model.exchange
        for transfer in self.transfers:
            for part in transfer.parts:
                if part.collective in _COMPONENT_INDEX and part.unit not in PAIR_ITEMS:
                    num_bytes = transfer_part_bytes(part, load, cuts, ranks)
                    for component, owner_s, common_s in self._byte_costs(transfer, part):
                        own[:, component] += num_bytes * owner_s
                        common[:, component] += num_bytes * common_s
                        column = component if width > 1 else 0
                        if part.collective == "hosts":
                            least = num_bytes * owner_s * cuts.min_share(part.unit)
                            saved_s[:, column] += num_bytes * owner_s - least
                            shared_s[:, column] += least * (1.0 - cuts.min_shards_in_host / per_host)
                    if part.collective == "host":  # what the rank itself asks for is less where it holds more
                        shared_s[:, column] += num_bytes * self._copy_byte_s * sent_share("host", ranks, per_host)
            if transfer.name == "ids":
                column = 1 if self.schedules is None else self.components.index(PACKING_PREFIX + "ids")
                common[:, column] += cost.bucket_id_s * load.num_ids * rows_are_cut / ranks
        return saved_s, shared_s

    def _byte_costs(self, transfer: Transfer, part: TransferPart) -> list[ByteCost]:
        """Where the bytes of a part go: on links, and then in packing, where these are told apart."""
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

    def _set_compute_seconds(self, found: Floats, both: tuple[Floats, Floats]) -> None:
        """Seconds of lookup and of update, [n] each, into components [n, K]."""
        found[:, 0] = both[0] + both[1]
        if self.schedules is not None:
            found[:, 1], found[:, 2] = both

    def _min_seconds(self, own: Floats, both: tuple[Floats, Floats], least: tuple[Floats, Floats]) -> Floats:
        """[n, L]: of seconds `own` [n, K], what is left where lookup and update take their `least`. No more than that
        is known of the update alone."""
        together = np.minimum(least[0] + least[1], both[0] + both[1])
        if self.schedules is None:
            added: Floats = together + own[:, 1:].sum(axis=1)
            return added[:, None]
        return np.column_stack([together, np.minimum(least[0], both[0]), np.zeros(len(own)), own[:, 3:]])

    def unoverlapped_seconds(self, seconds: Floats) -> Floats:
        """[n]: all that is done for pieces, and waited for, were nothing hidden."""
        if self.schedules is None:
            return seconds.sum(axis=1)
        return seconds[:, 0] + seconds[:, len(COMPUTE_COMPONENTS) :].sum(axis=1)

    def step_paths(self, options: ShardingOptions) -> tuple[StepPaths, float]:
        """What a step of these options is the longest of, and its seconds without any table."""
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
        """Seconds of a byte on its way: of the rank that has the piece, and of every rank."""
        copy_s, ranks, per_host = self._copy_byte_s, self.topology.num_ranks, self.topology.devices_per_host
        if way == "owners":
            return self._owner_byte_s + copy_s * (ranks - 2) / ranks, copy_s / ranks
        if way == "hosts":
            hosts = self.topology.num_hosts
            return (self._inter_host_byte_s * (hosts - 1) + copy_s * (hosts - 2)) / hosts, copy_s / ranks
        link_s = self._intra_host_byte_s if way == "host" or self.topology.num_hosts == 1 else self._inter_host_byte_s
        return (link_s + 2.0 * copy_s) * sent_share(way, ranks, per_host), 0.0

    def _link_byte_s(self, way: CollectiveKind) -> float:
        """Of these of the rank that has the piece, those on links."""
        if way == "owners":
            return self._owner_byte_s
        if way == "hosts":
            return self._inter_host_byte_s * (self.topology.num_hosts - 1) / self.topology.num_hosts
        link_s = self._intra_host_byte_s if way == "host" or self.topology.num_hosts == 1 else self._inter_host_byte_s
        return link_s * sent_share(way, self.topology.num_ranks, self.topology.devices_per_host)

    def sent_bytes(self, pieces: ShardArrays, cuts: ShardPartitioning, replicas: ShardArrays) -> dict[str, float]:
        """By transfer of tables: what all ranks together send to others for these pieces, as it is priced."""
        found: dict[str, float] = {}
        ranks, per_host = self.topology.num_ranks, self.topology.devices_per_host
        own, everywhere = self.loads.shard_loads(pieces, num_ranks=ranks), self.loads.shard_loads(replicas)
        for transfer in self.transfers:
            for part in transfer.parts if transfer.depends_on_plan else ():
                if part.unit in PAIR_ITEMS:
                    num_bytes = ranks * pair_bytes(part, ranks, per_host)
                else:
                    is_replica = part.unit in REPLICA_ITEMS
                    load, cut = (everywhere, UNPARTITIONED) if is_replica else (own, cuts)
                    num_bytes = float(transfer_part_bytes(part, load, cut, ranks).sum())
                share = sent_share(part.collective, ranks, per_host)
                found[transfer.name] = found.get(transfer.name, 0.0) + share * num_bytes
        return found

    def replica_costs(self, pieces: ShardArrays) -> ShardCosts:
        """Price pieces that every rank holds; all of it is common."""
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
        """Of every plan, added up: the dense part, the least latencies of the transfers of tables that it cannot do
        without, their headers, and the transfers of the dense part."""
        workload = self.loads.workload
        return dense_seconds(workload, self.topology, self.cost_model) + sum(
            s for _, s in self._fixed_transfer_seconds()
        )

    def _fixed_transfer_seconds(self) -> Iterator[tuple[str, float]]:
        """Seconds of transfers that every plan has, with the name of a schedule for each."""
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
        """The same by the names of a schedule, with the dense part."""
        workload = self.loads.workload
        found = dense_op_seconds(workload, dense_seconds(workload, self.topology, self.cost_model))
        for name, seconds in self._fixed_transfer_seconds():
            found[name] = found.get(name, 0.0) + seconds
        return found

    def _call_s(self, transfer: Transfer, *, crosses_hosts: bool) -> float:
        """Latencies of a transfer, and what its peers take; `crosses_hosts`: where ranks of other hosts are among
        those."""
        topology, per_host = self.topology, self.topology.devices_per_host
        call = _TransferCall(transfer.algorithm, count_peers(transfer, topology.num_ranks, per_host))
        both = select_links(self.cost_model, topology, transfer.is_reduction)
        return transfer.num_calls * call_seconds(call, both, topology, crosses_hosts and call.num_peers[1] > 0)

    def _min_call_s(self, transfer: Transfer) -> float:
        """The same, whether anything crosses hosts or not."""
        return min(self._call_s(transfer, crosses_hosts=True), self._call_s(transfer, crosses_hosts=False))

    def _is_unconditional(self, transfer: Transfer) -> bool:
        """Whether every step has a transfer of tables, wherever they lie."""
        if self.is_hierarchical:
            return transfer.name not in ("replicas", "row statistics")
        return any(part.collective == "owners" for part in transfer.parts)

    def _header_seconds(self, part: TransferPart) -> float:
        """Of what travels whatever pieces there are."""
        ranks = self.topology.num_ranks
        owner_s, common_s = self._byte_s(part.collective)
        return pair_bytes(part, ranks, self.topology.devices_per_host) * (owner_s + ranks * common_s)

    def _header_link_seconds(self, part: TransferPart) -> float:
        """The same on links."""
        num_bytes = pair_bytes(part, self.topology.num_ranks, self.topology.devices_per_host)
        return num_bytes * self._link_byte_s(part.collective)

    def _replicated_seconds(self, transfer: Transfer, amounts: Sequence[Floats]) -> tuple[Floats, Floats, Floats]:
        """Of the bytes of each part that every rank has alike, without latencies: on links, in packing, in codecs."""
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
        """[n, len(USES)]: 1 where a piece needs the collective."""
        known = np.array([ROW_STATISTICS.get(name, (0, 0))[0] for name in self.loads.optimizers], np.int64)
        statistics = (cuts.column_parts > 1) & (known[self.loads.optimizer_index[pieces.table]] > 0)
        read = self.loads.num_features[pieces.table] > 0
        none = np.zeros_like(statistics)
        partial = none if self.is_hierarchical else cuts.host_row_parts > 0
        return np.stack([partial, statistics, none, read, read & ~partial], axis=1).astype(np.int64)

    def optional_seconds(self) -> Floats:
        """[len(USES)]: of these collectives forwards and backwards, and of calls."""
        parts = self._optional_seconds_by_name()
        return np.array([float(sum(parts[name].values())) for name in OPTIONAL_COSTS])

    def _optional_seconds_by_name(self) -> dict[str, dict[str, float]]:
        """The same, of each use by the names of a schedule."""
        lookup_s, update_s = self.cost_model.lookup.call_s, self.cost_model.update.call_s
        found: dict[str, dict[str, float]] = {name: {} for name in OPTIONAL_COSTS}
        found["owners"] = {"lookup": lookup_s, "table_update": update_s}
        if self.topology.num_ranks == 1:
            return found
        found["replicas"] = {"table_update": 2 * update_s, "lookup": lookup_s}

        def add(use: str, transfer: Transfer, seconds: float) -> None:
            name = MERGED_TRANSFERS.get(transfer.name, transfer.name)
            found[use][name] = found[use].get(name, 0.0) + seconds

        for transfer in self.transfers:
            far_s = self._call_s(transfer, crosses_hosts=True)
            if transfer.name in ("row statistics", "replicas"):
                add(transfer.name, transfer, far_s)
            elif transfer.depends_on_plan and not self._is_unconditional(transfer):
                add("partial bags", transfer, far_s)
            elif transfer.depends_on_plan and not any(part.unit in PAIR_ITEMS for part in transfer.parts):
                use = "owners" if transfer.component == "input_dist" else "embeddings"
                add(use, transfer, far_s - self._min_call_s(transfer))
        return found

    def fixed_memory_bytes(self) -> tuple[int, int]:
        """Bytes of its device and of its host's memory that every rank holds beside tables and what their exchange
        takes."""
        return fixed_bytes(self.loads, self.topology.num_ranks, self.run)


_COMPONENT_INDEX: dict[CollectiveKind, int] = {"owners": 2, "host": 3, "hosts": 4, "columns": 5}
"""Index in COMPONENTS of what travels on each way between a piece's owner and others; ids are apart."""


@dataclass(frozen=True)
class _TransferCall:
    """A collective by its latency alone."""

    algorithm: AllReduceAlgorithm | None
    num_peers: tuple[int, int]


def overlap_schedules(
    workload: Workload, transfers: Sequence[Transfer], is_two_level: bool
) -> list[tuple[Schedule, Mask]] | None:
    """Of a step that uses nothing which only some tables need; and of those that add up bags inside hosts, exchange row
    statistics, or both, each with what of USES it needs. None where nothing is hidden."""
    found = []
    names = [transfer.name for transfer in transfers]
    partial = () if is_two_level else (HOST_POOLED_BAGS, GRADIENT_TRANSFERS[HOST_POOLED_BAGS])
    optional = {"partial bags": partial, "row statistics": ("row statistics",)}
    for needed in ((), ("partial bags",), ("row statistics",), ("partial bags", "row statistics")):
        if any(not set(optional[use]) & set(names) for use in needed):
            continue
        absent = {name for use, of_use in optional.items() if use not in needed for name in of_use}
        schedule = schedule_for(workload, [name for name in names if name not in absent])
        if schedule is None:
            return None
        found.append((schedule, np.isin(OPTIONAL_COSTS, needed)))
    return found


def overlap_components(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """What ranks do in step with each other where something is hidden: lookups, updates, and of each transfer of tables
    what is on links and what is not."""
    names = dict.fromkeys(MERGED_TRANSFERS.get(one.name, one.name) for one in transfers if one.depends_on_plan)
    return (*COMPUTE_COMPONENTS, *(prefix + name for name in names for prefix in ("", PACKING_PREFIX)))


def sent_share(way: CollectiveKind, num_ranks: int, per_host: int) -> float:
    """Of the bytes of a piece, what does not stay on the rank where it is; of a sum, what all ranks send."""
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
