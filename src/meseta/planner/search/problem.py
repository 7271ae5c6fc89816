"""Search problem: workload, topology and constraints as arrays of options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, ShardArrays, WorkloadLoads
from meseta.planner.cost.memory import RunBytes
from meseta.planner.search.assignment import UNLIMITED, Assignment, Cluster, Floats, Ints, Mask, ShardingOptions
from meseta.planner.search.cost_estimator import OPTIONAL_COSTS, AlgorithmPair, ShardCostEstimator, ShardPartitioning
from meseta.planner.search.schemes import SchemeSpace, ShardingScheme, enumerate_schemes, make_table_plan
from meseta.spec import CostModel, MesetaError, Plan, ShardingType, TablePlan, Topology, Workload
from meseta.spec.constraints import Constraints, TableRule
from meseta.spec.shards import HOST_REDUCED_TYPES
from meseta.spec.tiers import DISK, HBM, HOST, TIERS, Memory, StorageOptions, Tier

MAX_RANKS_ALL_PARTS = 16
"""Maximum number of ranks for which all numbers of parts are considered."""
PARTS_PER_SHARE = 8
"""Maximum number of shards of a table per average rank's share of time or memory that it needs."""
HOT_SHARES = (0.5, 0.8, 0.95)
"""Shares of a table's lookups for which the most frequent rows may be replicated."""
MAX_REPLICA_SHARE = 0.25
"""Maximum size of the replica of a table, relative to a device."""
CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of a table's rows that a cache may hold."""
MAX_TABLES_ALL_CACHE_SHARES = 100
"""Maximum number of tables for which all of `CACHE_SHARES` are considered."""


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Options of all tables with their costs, and the memory limits."""

    workload: Workload
    topology: Topology
    cost_model: CostModel
    loads: WorkloadLoads
    units: tuple[tuple[int, ...], ...]
    """Tables of each unit: one, or several that stay together."""
    options: ShardingOptions
    schemes: tuple[ShardingScheme | None, ...]
    """Scheme of each option [W]. `None` keeps the placement of an earlier plan."""
    kept_tables: Mapping[str, TablePlan]
    cluster: Cluster
    min_s: Floats
    """Lower bounds of the seconds of each shard [n, 2, L], see `ShardCosts.min_s`."""
    fixed_s: float
    """Seconds of a step that do not depend on the assignment."""
    run: RunBytes | None = None
    algorithms: AlgorithmPair = (None, None)
    cache_rows: Mapping[tuple[int, int], Ints] = field(default_factory=dict)
    """Cache capacity of each shard by (option, table). 0 means no cache."""

    def to_plan(self, assignment: Assignment) -> Plan:
        """Convert a complete assignment to a plan. The cost of a table is the total seconds of all ranks."""
        num_ranks, entry_of = self.topology.num_ranks, {}
        for unit, tables in enumerate(self.units):
            option = int(assignment.option[unit])
            for table in tables:
                spec, scheme = self.workload.tables[table], self.schemes[option]
                entry_of[table] = (
                    self.kept_tables[spec.name]
                    if scheme is None
                    else make_table_plan(
                        spec, scheme, assignment.ranks[unit], num_ranks, self.cache_rows[option, table]
                    )
                )
        seconds = self.unit_seconds_all_ranks(assignment.option)
        cost = {table: float(seconds[unit]) / len(tables) for unit, tables in enumerate(self.units) for table in tables}
        entries = tuple(replace(entry_of[table], cost=cost[table]) for table in range(len(self.workload.tables)))
        exchange, dense_exchange = self.algorithms
        return Plan(
            num_ranks=num_ranks,
            tables=entries,
            devices_per_host=self.topology.devices_per_host,
            exchange=exchange,
            dense_exchange=dense_exchange,
        )

    def unit_seconds(self, choice: Ints) -> Floats:
        """Return the seconds of each unit [U] on the rank where it takes longest."""
        options = self.options
        longest = np.zeros(len(options.unit_index))
        seconds = options.unoverlapped_seconds(options.seconds)
        np.maximum.at(longest, np.repeat(np.arange(len(longest)), np.diff(options.first_shard)), seconds)
        return longest[choice] + options.unoverlapped_seconds(options.common_seconds[choice])

    def unit_seconds_all_ranks(self, choice: Ints) -> Floats:
        """Return the total seconds of each unit [U] over all ranks."""
        options = self.options
        owner = np.repeat(np.arange(len(options.unit_index)), np.diff(options.first_shard))
        pieces = np.bincount(owner, options.unoverlapped_seconds(options.seconds), len(options.unit_index))
        return pieces[choice] + self.cluster.num_ranks * options.unoverlapped_seconds(options.common_seconds[choice])

    def describe_option(self, option: int) -> str:
        """Return a short description of an option for reports."""
        scheme = self.schemes[option]
        return "as before" if scheme is None else scheme.describe()


def make_problem(
    workload: Workload,
    topology: Topology,
    cost_model: CostModel,
    constraints: Constraints,
    *,
    tiers: Sequence[Tier],
    kept_tables: Mapping[str, TablePlan] | None = None,
    estimator: ShardCostEstimator | None = None,
) -> PlacementProblem:
    """Estimate the costs of all options of all tables.

    Args:
        workload: Tables and features.
        topology: Hosts and devices.
        cost_model: Constants of the devices.
        constraints: Constraints, which must have been checked.
        tiers: Tiers of tables without a tier constraint.
        kept_tables: Placements in an earlier plan that must be kept.
        estimator: Estimator of shard costs. `None` uses its defaults.

    Raises MesetaError if a table has no option, or if the fixed memory of a rank exceeds its device.
    """
    estimator = estimator or ShardCostEstimator(WorkloadLoads(workload), topology, cost_model)
    units = _make_units(workload, constraints)
    machine = _make_cluster(estimator, topology, constraints)
    builder = _ProblemBuilder(estimator, machine, constraints, tiers, kept_tables or {})
    for unit in units:
        builder.add_unit(unit)
    options, least_s, fixed_s = builder.build()
    return PlacementProblem(
        workload=workload,
        topology=topology,
        cost_model=cost_model,
        loads=estimator.loads,
        units=units,
        options=options,
        schemes=tuple(builder.schemes),
        kept_tables=dict(kept_tables or {}),
        cluster=machine,
        min_s=least_s,
        fixed_s=fixed_s,
        run=estimator.run,
        algorithms=estimator.algorithms,
        cache_rows=builder.cache_rows,
    )


def _make_units(workload: Workload, constraints: Constraints) -> tuple[tuple[int, ...], ...]:
    """Return the units. Tables that must stay together form one unit at the position of the first table."""
    number = {table.name: i for i, table in enumerate(workload.tables)}
    unit_of: dict[int, tuple[int, ...]] = {i: (i,) for i in number.values()}
    for names in constraints.together:
        group = tuple(number[name] for name in constraints.match_tables(names, workload.tables))
        unit_of.update((i, group) for i in group)
    return tuple(dict.fromkeys(unit_of[i] for i in number.values()))


def _make_cluster(prices: ShardCostEstimator, topology: Topology, constraints: Constraints) -> Cluster:
    """Return the memory limits of ranks and hosts, without the fixed memory of each rank."""
    free = constraints.keep_free_bytes
    on_device, on_host = prices.fixed_memory_bytes()
    if topology.has_shared_host_memory:
        on_device, on_host = on_device + on_host, 0
    taken = {HBM: on_device, HOST: on_host * topology.devices_per_host, DISK: 0}
    has: dict[Memory, int | None] = {HBM: topology.hbm_bytes}
    has |= {HOST: topology.host_bytes or 0, DISK: topology.disk_bytes or 0}
    room = {
        name: UNLIMITED if whole is None else max(whole - taken[name] - free.get(name, 0), 0)
        for name, whole in has.items()
    }
    if not room[HBM]:
        raise MesetaError(
            f"planner: ids, bags and the dense part need {taken[HBM]:,} bytes of each device and keep_free_bytes is "
            f"{free.get(HBM, 0):,}, but hbm_bytes is only {topology.hbm_bytes:,}; lower the batch size, or use more "
            "ranks or larger devices"
        )
    count = UNLIMITED if constraints.max_tables_per_rank is None else constraints.max_tables_per_rank
    return Cluster(
        devices_per_host=topology.devices_per_host,
        rank_capacity=np.tile(np.array([room[HBM], count], np.int64), (topology.num_ranks, 1)),
        host_capacity=np.tile(np.array([room[HOST], room[DISK]], np.int64), (topology.num_hosts, 1)),
    )


class _ProblemBuilder:  # Collects all options, then estimates all shards together.
    def __init__(
        self,
        prices: ShardCostEstimator,
        machine: Cluster,
        constraints: Constraints,
        tiers: Sequence[Tier],
        kept: Mapping[str, TablePlan],
    ) -> None:
        self._estimator, self._cluster, self._constraints, self._kept_tables = prices, machine, constraints, kept
        loads, self._topology = prices.loads, prices.topology
        self._tables = loads.workload.tables
        self._tiers = tiers
        whole = loads.whole_tables()
        one = np.ones(len(whole.table), np.int64)
        priced = prices.shard_costs(
            whole, ShardPartitioning(host_row_parts=0 * one, column_parts=one, host_column_parts=one, row_parts=one)
        )
        self._max_parts = self._max_useful_parts(prices.unoverlapped_seconds(priced.seconds), priced.rank_bytes)
        self.schemes: list[ShardingScheme | None] = []
        self.cache_rows: dict[tuple[int, int], Ints] = {}
        self._units: list[int] = []
        self._first_shard, self._block_size = [0], list[int]()
        self._fixed_ranks: dict[int, Ints] = {}
        self._shard_rectangles: list[Ints] = []  # [p, 9]: shard, table, rectangle (4), tier, cache rows, option
        self._replicas: list[tuple[int, int, int]] = []  # option, table, rows
        self._allowed_ranks: dict[int, Mask] = {}

    def _max_useful_parts(self, seconds: Floats, num_bytes: Ints) -> Ints:
        """Return the number of shards of each table beyond which neither balance nor memory improves."""
        ranks, room = self._topology.num_ranks, self._cluster.rank_capacity[0, 0]
        if ranks <= MAX_RANKS_ALL_PARTS:
            return np.full(len(seconds), ranks)
        shares = seconds / max(seconds.sum() / ranks, 1e-30)
        shares = np.maximum(shares, num_bytes / room)
        return np.clip(np.ceil(PARTS_PER_SHARE * shares), 2, ranks).astype(np.int64)

    def add_unit(self, tables: Sequence[int]) -> None:
        """Add all options of a unit. Raises MesetaError if it has none."""
        number, names = self._num_units, [self._tables[table].name for table in tables]
        before = len(self.schemes)
        rules = [self._constraints.rule(name) for name in names]
        pinned = [set(rule.ranks) for rule in rules if rule.ranks is not None]
        ranks = self._topology.num_ranks
        if pinned:
            self._allowed_ranks[number] = np.isin(np.arange(ranks), list(set.intersection(*pinned)))
        if all(name in self._kept_tables for name in names):
            self._add_kept_option(number, tables)
        else:
            for scheme in self._candidate_schemes(tables, rules):
                if self._is_allowed(scheme, rules, number):
                    self._add_option(number, tables, scheme)
        if len(self.schemes) == before:
            raise MesetaError(
                f"constraints: no placement is possible for {' and '.join(map(repr, names))}: no allowed sharding type "
                f"and tier fits the table on {len(self._unit_ranks(number))} allowed ranks; allow other types, tiers "
                "or ranks"
            )
        self._num_units += 1

    _num_units = 0

    def _unit_ranks(self, unit: int) -> Ints:
        return np.flatnonzero(self._allowed_ranks.get(unit, np.ones(self._topology.num_ranks, np.bool_)))

    def _candidate_schemes(self, tables: Sequence[int], rules: Sequence[TableRule]) -> Iterator[ShardingScheme]:
        """Yield the schemes of a unit, from its first table. The other tables have the same schemes."""
        first = self._tables[tables[0]]
        topology = self._topology
        tiers = list(self._tiers)
        for rule in rules:
            if rule.tiers is not None:
                tiers = [tier for tier in rule.tiers if tier in topology.tiers]
        # These optimizers update all rows in each step, so all rows must be in device memory.
        if any(self._tables[table].optimizer.stepped_rows == "all" for table in tables):
            tiers = [HBM]
        asked = {sharding for rule in rules for sharding in rule.sharding or ()}
        shape = SchemeSpace(
            num_hosts=topology.num_hosts,
            devices_per_host=topology.devices_per_host,
            max_parts=int(max(self._max_parts[table] for table in tables)),
            hot_rows=self._hot_row_counts(tables),
            can_replicate=ShardingType.DATA_PARALLEL in asked or self._can_replicate(tables, first.num_embeddings),
            cache_shares=self._cache_shares,
        )
        for tier in tiers:
            yield from enumerate_schemes(first, shape, tier)

    @property
    def _cache_shares(self) -> tuple[float, ...]:
        # For large problems one share is enough, because caches are reallocated after the search.
        is_small = len(self._tables) <= MAX_TABLES_ALL_CACHE_SHARES and self._topology.num_ranks <= MAX_RANKS_ALL_PARTS
        return CACHE_SHARES if is_small else (self._estimator.cost_model.tiers.cached_share,)

    def _hot_row_counts(self, tables: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of hot rows to consider. Empty unless rows are sorted by frequency."""
        loads, table = self._estimator.loads, tables[0]
        if len(tables) > 1 or not loads.is_frequency_sorted[table]:
            return ()
        ends = np.cumsum(loads.row_classes.num_rows[table])
        shares = np.cumsum(loads.row_classes.lookup_shares[table])
        # A hot range ends with a class of the reuse histogram.
        rows = {int(ends[min(int(np.searchsorted(shares, share)), len(ends) - 1)]) for share in HOT_SHARES}
        return tuple(sorted(n for n in rows if 0 < n < loads.num_rows[table] and self._can_replicate(tables, n)))

    def _can_replicate(self, tables: Sequence[int], num_rows: int) -> bool:
        """Whether replicas leave enough memory, and their gradients are not much larger than the bags."""
        loads = self._estimator.loads
        dims, batch = loads.dims[list(tables)], loads.workload.batch_size
        gradient = num_rows * (dims + 1).sum() * loads.element_bytes
        bags = 4.0 * batch * (loads.ids_per_sample[list(tables)] + loads.num_pooled[list(tables)]) @ (dims + 4.0)
        return bool(
            gradient <= min(MAX_REPLICA_SHARE * self._cluster.rank_capacity[0, 0], 4.0 * bags * loads.element_bytes)
        )

    def _is_allowed(self, scheme: ShardingScheme, rules: Sequence[TableRule], unit: int) -> bool:
        if not all(rule.sharding is None or scheme.sharding_type in rule.sharding for rule in rules):
            return False
        ranks = self._unit_ranks(unit)
        is_everywhere = scheme.sharding_type in (ShardingType.DATA_PARALLEL, ShardingType.HOT_REPLICATED)
        if len(ranks) == self._topology.num_ranks:
            return True
        return not is_everywhere and scheme.row_parts * scheme.column_parts <= len(ranks)

    def _add_option(self, unit: int, tables: Sequence[int], scheme: ShardingScheme) -> None:
        """Add an option, unless the tables of the unit would have different numbers of shards."""
        spans = [scheme.shard_rectangles(self._tables[t].num_embeddings, self._tables[t].embedding_dim) for t in tables]
        count = len(spans[0])
        if any(len(span) != count for span in spans):
            return
        option, per_host = len(self.schemes), self._topology.devices_per_host
        block = 0
        if scheme.is_within_host:
            block = scheme.row_parts if scheme.sharding_type is ShardingType.GRID else count
            if count % block or block > per_host or count // block > self._topology.num_hosts:
                return
        self._append_option(unit, block, count, scheme)
        tier = TIERS.index(scheme.tier)
        for table, span in zip(tables, spans, strict=True):
            index = self._first_shard[option] + np.arange(count)
            near = self._compute_cache_rows(table, span, scheme)
            columns = [index, np.full(count, table), *span.T, np.full(count, tier), near, np.full(count, option)]
            self._shard_rectangles.append(np.stack(columns, axis=1).astype(np.int64))
            self.cache_rows[option, table] = near
            rows = self._tables[table].num_embeddings
            if scheme.sharding_type is ShardingType.DATA_PARALLEL or scheme.hot_rows:
                self._replicas.append((option, table, scheme.hot_rows or rows))

    def _compute_cache_rows(self, table: int, span: Ints, scheme: ShardingScheme) -> Ints:  # [p]
        if not scheme.cache_share:
            return np.zeros(len(span), np.int64)
        pieces = ShardArrays.from_values(table, (span[:, 0], span[:, 1]), (span[:, 2], span[:, 3]))
        share = np.ceil(scheme.cache_share * pieces.num_rows)
        # A cache must hold the rows of all batches in flight.
        num_batches = (self._estimator.run.storage or StorageOptions()).num_cached_batches((scheme.tier,))
        return np.maximum(share, self._estimator.loads.min_cache_rows(pieces, num_batches)).astype(np.int64)

    def _append_option(self, unit: int, block: int, count: int, scheme: ShardingScheme | None) -> None:
        self._units.append(unit)
        self._block_size.append(block)
        self._first_shard.append(self._first_shard[-1] + count)
        self.schemes.append(scheme)

    def _add_kept_option(self, unit: int, tables: Sequence[int]) -> None:
        option, ranks = len(self.schemes), list[int]()
        rows: list[tuple[int, ...]] = []
        start = self._first_shard[option]
        for table in tables:
            entry = self._kept_tables[self._tables[table].name]
            for shard in entry.shards:
                if entry.is_replica(shard):
                    self._replicas.append((option, table, shard.num_rows))
                    continue
                cache_rows, tier = shard.cache_rows or 0, TIERS.index(shard.tier)
                if tier in OFFLOADED_TIER_INDICES and not cache_rows:
                    cache_rows = math.ceil(self._estimator.cost_model.tiers.cached_share * shard.num_rows)
                rows.append((start + len(rows), table, *shard.rows, *shard.columns, tier, cache_rows, option))
                ranks.append(shard.ranks[0])
        self._append_option(unit, 0, len(rows), None)
        self._fixed_ranks[option] = np.array(ranks, np.int64)
        self._shard_rectangles.append(np.array(rows, np.int64).reshape(-1, 9))

    def build(self) -> tuple[ShardingOptions, Floats, float]:
        """Return the options, the lower bounds of each shard [n, 2, L], and the fixed seconds of a step."""
        spans = np.concatenate([*self._shard_rectangles, np.zeros((0, 9), np.int64)])
        piece, option = spans[:, 0], spans[:, 8]
        pieces = ShardArrays(*spans[:, 1:8].T)
        cuts = self._make_partitioning(pieces, option)
        priced = self._estimator.shard_costs(pieces, cuts)
        n, num_ways, width = self._first_shard[-1], len(self.schemes), len(self._estimator.components)
        seconds, least_s = np.zeros((n, width)), np.zeros((n, *priced.min_s.shape[1:]))
        rank_need, host_need = np.zeros((n, 2), np.int64), np.zeros((n, 2), np.int64)
        common, common_need = np.zeros((num_ways, width)), np.zeros((num_ways, 2), np.int64)
        uses = np.zeros((num_ways, len(OPTIONAL_COSTS)), np.int64)
        np.add.at(seconds, piece, priced.seconds)
        np.add.at(least_s, piece, priced.min_s)
        np.add.at(rank_need, piece, np.stack([priced.rank_bytes, np.ones_like(piece)], axis=1))
        np.add.at(host_need, piece, priced.host_bytes)
        np.add.at(common, option, priced.common_seconds)
        np.add.at(common_need[:, 0], option, priced.common_bytes)
        np.maximum.at(uses, option, self._estimator.optional_costs(cuts, pieces))
        everywhere = np.zeros(num_ways, np.bool_)
        if self._replicas:
            replica_option, tables, rows = np.array(self._replicas, np.int64).T
            replicas = self._estimator.replica_costs(
                ShardArrays.from_values(tables, (0, rows), (0, self._estimator.loads.dims[tables]))
            )
            np.add.at(common, replica_option, replicas.common_seconds)
            np.add.at(
                common_need, replica_option, np.stack([replicas.common_bytes, np.ones_like(replica_option)], axis=1)
            )
            everywhere[replica_option], uses[replica_option, OPTIONAL_COSTS.index("replicas")] = True, 1
        options = ShardingOptions(
            unit_index=np.array(self._units, np.int64),
            first_shard=np.array(self._first_shard, np.int64),
            block_size=np.array(self._block_size, np.int64),
            common_seconds=common,
            common_demand=common_need,
            is_replicated=everywhere,
            optional_costs=uses,
            optional_s=self._estimator.optional_seconds(),
            seconds=seconds,
            rank_demand=rank_need,
            host_demand=host_need,
            fixed_ranks=self._fixed_ranks,
            allowed_ranks=self._allowed_ranks,
            conflicts=self._make_conflicts(),
        )
        if self._estimator.schedules is None:
            return options, least_s, self._estimator.fixed_seconds()
        paths, fixed_s = self._estimator.step_paths(options)
        return replace(options, paths=paths), least_s, fixed_s

    def _make_partitioning(self, pieces: ShardArrays, option: Ints) -> ShardPartitioning:
        key = option * (len(self._tables) + 1) + pieces.table
        row_parts = _count_distinct(key, pieces.first_row)
        column_parts = _count_distinct(key, pieces.first_column)
        summed = np.array(
            [scheme is not None and scheme.sharding_type in HOST_REDUCED_TYPES for scheme in self.schemes], np.bool_
        )
        kept = np.array([scheme is None for scheme in self.schemes], np.bool_)
        host_parts = np.where(summed[option], row_parts, 0) if len(option) else option
        for index in np.flatnonzero(kept[option]) if len(option) else ():
            entry = self._kept_tables[self._tables[pieces.table[index]].name]
            host_parts[index] = row_parts[index] if entry.sharding in HOST_REDUCED_TYPES else 0
        block = np.maximum(np.array(self._block_size, np.int64), 1)[option] if len(option) else option
        if not self._estimator.is_hierarchical:
            columns = np.ones_like(row_parts)
            return ShardPartitioning(
                host_row_parts=host_parts,
                column_parts=column_parts,
                host_column_parts=columns,
                row_parts=row_parts,
                min_shards_in_host=block,
            )
        return self._make_host_partitioning(key, pieces, option, (row_parts, column_parts, block))

    def _make_host_partitioning(
        self, key: Ints, pieces: ShardArrays, option: Ints, parts: tuple[Ints, Ints, Ints]
    ) -> ShardPartitioning:
        """Return the partitioning for a hierarchical exchange, which depends on the shards of each host."""
        hosts, per_host, (row_parts, column_parts, block) = (
            self._topology.num_hosts,
            self._cluster.devices_per_host,
            parts,
        )
        # Shards that may be on any ranks are assumed to be spread evenly over hosts, at most one per rank. Kept shards
        # have known ranks.
        is_apart = np.array(self._block_size, np.int64)[option] == 0 if len(option) else np.zeros(0, np.bool_)
        of_grid = np.array(
            [scheme is not None and scheme.sharding_type is ShardingType.GRID for scheme in self.schemes]
        )
        in_host = (row_parts, np.where(of_grid[option], 1, column_parts) if len(option) else option)
        even = [np.where(is_apart, -(-number // hosts), one) for number, one in zip(parts[:2], in_host, strict=True)]
        most = [
            np.where(is_apart, np.minimum(number, per_host), one)
            for number, one in zip(parts[:2], in_host, strict=True)
        ]
        for index, ranks in self._fixed_ranks.items():
            shards = np.flatnonzero(option == index)
            at = key[shards] * hosts + ranks // per_host
            for number, (first, counts) in enumerate(((pieces.first_column, even[0]), (pieces.first_row, even[1]))):
                _, place, count = np.unique(
                    np.stack([at, first[shards]]), axis=1, return_inverse=True, return_counts=True
                )
                counts[shards] = most[number][shards] = count[place.reshape(-1)]
        return ShardPartitioning(
            host_row_parts=even[0],
            column_parts=column_parts,
            host_column_parts=even[1],
            row_parts=row_parts,
            max_host_row_parts=most[0],
            max_host_column_parts=most[1],
            min_shards_in_host=block,
        )

    def _make_conflicts(self) -> dict[int, tuple[int, ...]]:
        unit_of: dict[str, int] = {}
        for unit, tables in enumerate(_make_units(self._estimator.loads.workload, self._constraints)):
            unit_of |= {self._tables[table].name: unit for table in tables}
        conflicts: dict[int, set[int]] = {}
        for names in self._constraints.apart:
            group = {unit_of[name] for name in self._constraints.match_tables(names, self._tables)}
            for unit in group:
                conflicts.setdefault(unit, set()).update(group - {unit})
        return {unit: tuple(sorted(conflicting)) for unit, conflicting in conflicts.items()}


def _count_distinct(key: Ints, values: Ints) -> Ints:
    """Return the number of distinct values with the same key as each entry [n]."""
    if not len(key):
        return key
    pairs, inverse = np.unique(np.stack([key, values], axis=1), axis=0, return_inverse=True)
    counts = np.unique(pairs[:, 0], return_counts=True)
    return counts[1][np.searchsorted(counts[0], pairs[inverse.reshape(-1), 0])]
