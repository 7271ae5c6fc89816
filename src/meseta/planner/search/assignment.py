"""Assignment of shards to ranks, as arrays that the search works on.

A unit is a table, or several tables that stay together. An option is one way to split a unit into shards, and possibly
replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Dimensions of arrays: R ranks, H hosts, U units, W options, n shards, K components of a step, C optional costs and
# P paths. Each component ends with its slowest rank, so the cost of an assignment is the sum over components of the
# maximum over ranks. With overlap, it is the longest of several such sums, the paths.
UNLIMITED = 2**62
"""Memory limit that is not checked."""
CRITICAL_PATH_SHARE = 0.01
"""Maximum relative difference between a critical path and the longest path."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Memory limits of ranks and hosts. Rank r is on host r // devices_per_host."""

    devices_per_host: int
    rank_capacity: Ints
    """Bytes of each device, and maximum number of tables on it [R, 2]."""
    host_capacity: Ints
    """Bytes of DRAM and disk of each host [H, 2]."""

    @property
    def num_ranks(self) -> int:
        return len(self.rank_capacity)


@dataclass(frozen=True, kw_only=True)
class StepPaths:
    """P sums of components, the longest of which is the duration of a step with overlap."""

    coefs: Floats
    """Number of times that each path contains each component [P, K]."""
    fixed_s: Floats
    """Seconds of each path in addition to a step without tables [P]."""
    optional_s: Floats
    """Seconds that each optional cost adds to each path [P, C]."""
    required_costs: Mask
    """Optional costs without which a path does not exist [P, C]."""
    weights: Floats
    """Weight of each component as long as the longest path is unknown [K]."""

    def path_seconds(self, seconds: Floats, is_used: Mask) -> Floats:
        """Return the seconds of each path [..., P], for component seconds [..., K] and used optional costs [..., C]."""
        is_missing = ~is_used @ self.required_costs.T
        of_uses = np.where(is_missing, -np.inf, is_used @ self.optional_s.T + self.fixed_s)
        path_s: Floats = seconds @ self.coefs.T + of_uses
        return path_s


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of all units, with W options and n shards in total."""

    # Example: unit 0 can be whole or split in two, and unit 1 whole or replicated, so W = 4 and n = 4.
    #
    #    option          0     1        2     3
    #    unit_index      0     0        1     1
    #    first_shard     0     1        3     4     4
    #    shard           0     1  2     3
    #    is_replicated   no    no       no    yes
    unit_index: Ints
    """Unit of each option, in ascending order [W]."""
    first_shard: Ints
    """Index of the first shard of each option, followed by the total number of shards [W + 1]."""
    # Shards of a block, or of an option without blocks, are on different ranks.
    block_size: Ints
    """Number of consecutive shards that must share a host [W]. 0 means no restriction."""
    common_seconds: Floats  # [W, K]: on all ranks
    common_demand: Ints
    """Bytes and tables that each option needs on all ranks [W, 2]."""
    is_replicated: Mask  # [W]
    optional_costs: Ints  # [W, C]: 1 if the option needs the collective, otherwise 0
    optional_s: Floats
    """Seconds of each optional collective [C], regardless of how many units need it."""
    seconds: Floats  # [n, K]: on the rank of the shard
    rank_demand: Ints
    """Bytes and tables that each shard needs on its rank [n, 2]."""
    host_demand: Ints
    """Bytes of DRAM and disk that each shard needs on its host [n, 2]."""
    fixed_ranks: Mapping[int, Ints] = field(default_factory=dict)
    """Ranks of the shards of options with fixed ranks, by option."""
    allowed_ranks: Mapping[int, Mask] = field(default_factory=dict)
    """Mask of allowed ranks [R], by unit. Units without a mask may be on all ranks."""
    conflicts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # units that must not share a rank
    paths: StepPaths | None = None
    """Paths of a step with overlap. `None` means that a step is the sum of all components."""

    def step_s(self, busy: Floats, common: Floats, is_used: Mask) -> Floats:
        """Return the seconds of a step [...] in addition to fixed seconds.

        Args:
            busy: Seconds of the slowest rank of each component [..., K].
            common: Seconds of all ranks [..., K].
            is_used: Whether each optional cost applies [..., C].
        """
        if self.paths is None:
            return np.asarray(busy.sum(axis=-1) + (common.sum(axis=-1) + is_used @ self.optional_s))
        return np.asarray(self.paths.path_seconds(busy + common, is_used).max(axis=-1))

    def weighted_seconds(self, seconds: Floats) -> Floats:
        """Return the weighted sum [...] of component seconds [..., K]."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds @ self.paths.weights

    def exchange_seconds(self, seconds: Floats) -> Floats:
        """Return the weighted sum [...] of the exchange components of `seconds` [..., K]."""
        first = self.num_compute_components
        if self.paths is None:
            return seconds[..., first:].sum(axis=-1)
        return seconds[..., first:] @ self.paths.weights[first:]

    def unoverlapped_seconds(self, seconds: Floats) -> Floats:
        """Return the sum [...] of component seconds [..., K] without overlap."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds[..., 0] + seconds[..., self.num_compute_components :].sum(axis=-1)

    @property
    def num_compute_components(self) -> int:
        """Number of leading components that are computation and not exchange."""
        return 1 if self.paths is None else 3

    @cached_property
    def shard_s(self) -> Floats:
        """Weighted seconds of each shard on its rank [n]."""
        return self.weighted_seconds(self.seconds)

    @cached_property
    def common_s(self) -> Floats:  # [W]
        return self.weighted_seconds(self.common_seconds)

    @cached_property
    def option_of_shard(self) -> Ints:  # [n]
        return np.repeat(np.arange(len(self.unit_index)), np.diff(self.first_shard))

    @cached_property
    def total_seconds(self) -> Floats:
        """Sum of each component over the shards of each option [W, K]."""
        totals = np.zeros_like(self.common_seconds)
        np.add.at(totals, self.option_of_shard, self.seconds)
        return totals

    @property
    def num_units(self) -> int:
        return int(self.unit_index[-1]) + 1 if len(self.unit_index) else 0

    @cached_property
    def max_seconds(self) -> Floats:
        """Maximum of each component over the shards of each option [W, K], or 0 without shards."""
        maxima = np.zeros_like(self.common_seconds)
        np.maximum.at(maxima, self.option_of_shard, self.seconds)
        return maxima

    def unit_options(self, unit: int) -> range:
        return range(*(int(end) for end in np.searchsorted(self.unit_index, [unit, unit + 1])))

    def shard_slice(self, option: int) -> slice:
        return slice(int(self.first_shard[option]), int(self.first_shard[option + 1]))


class Assignment:
    """Options and ranks of all units, with the resulting load of each rank. Instances are mutable."""

    def __init__(self, options: ShardingOptions, machine: Cluster, choice: Ints) -> None:
        """Create an assignment without placed units. Their common costs count as if they had the options
        `choice` [U]."""
        self.options, self.cluster = options, machine
        self.counted_option = choice.copy()
        """Option whose common costs are counted for each unit, placed or not [U]."""
        self.common_seconds = options.common_seconds[choice].sum(axis=0)  # [K]
        self.optional_counts = options.optional_costs[choice].sum(axis=0)
        """Number of units that need each optional collective [C]."""
        self.option = np.full(options.num_units, -1, np.int64)
        """Option of each unit, or -1 if it is not placed [U]."""
        self.ranks: list[Ints] = [np.zeros(0, np.int64)] * options.num_units
        self.load = np.zeros((options.seconds.shape[1], machine.num_ranks))  # [K, R]: seconds
        self.rank_used = np.zeros_like(machine.rank_capacity) + options.common_demand[choice].sum(axis=0)
        self.host_used = np.zeros_like(machine.host_capacity)
        self._rank_hosts = np.arange(machine.num_ranks) // machine.devices_per_host

    def copy(self) -> Assignment:
        other = Assignment.__new__(Assignment)
        other.options, other.cluster, other._rank_hosts = self.options, self.cluster, self._rank_hosts
        other.counted_option, other.common_seconds, other.optional_counts = (
            self.counted_option.copy(),
            self.common_seconds.copy(),
            self.optional_counts.copy(),
        )
        other.option, other.ranks, other.load = self.option.copy(), list(self.ranks), self.load.copy()
        other.rank_used, other.host_used = self.rank_used.copy(), self.host_used.copy()
        return other

    @property
    def cost(self) -> float:
        """Seconds of a step in addition to fixed seconds."""
        return float(self.options.step_s(self.load.max(axis=1), self.common_seconds, self.optional_counts > 0))

    def cost_with(self, busy: Floats) -> Floats:
        """Return the cost [...] if the slowest ranks had the component seconds `busy` [..., K]. Without overlap, common
        seconds are omitted."""
        if self.options.paths is None:
            return np.asarray(busy.sum(axis=-1))
        return self.options.step_s(busy, self.common_seconds, self.optional_counts > 0)

    @property
    def tie_breaker(self) -> float:
        """Sum of squared loads. Among assignments of equal cost, the one with the lower value is more balanced."""
        return float(np.square(self.load).sum())

    def place(self, option: int, ranks: Ints) -> None:
        """Place a unit on ranks."""
        self._apply(option, ranks, 1)
        unit = int(self.options.unit_index[option])
        self.option[unit], self.ranks[unit] = option, ranks
        self.count_option(unit, option)

    def count_option(self, unit: int, option: int) -> None:
        """Count the common costs of another option for a unit."""
        before = int(self.counted_option[unit])
        if before != option:
            options = self.options
            self.common_seconds += options.common_seconds[option] - options.common_seconds[before]
            self.rank_used += options.common_demand[option] - options.common_demand[before]
            self.optional_counts += options.optional_costs[option] - options.optional_costs[before]
            self.counted_option[unit] = option

    def remove(self, unit: int) -> tuple[int, Ints]:
        """Remove a unit. Returns its (option, ranks), the arguments of `place`."""
        option, ranks = int(self.option[unit]), self.ranks[unit]
        self._apply(option, ranks, -1)
        self.option[unit] = -1
        return option, ranks

    def _apply(self, option: int, ranks: Ints, sign: int) -> None:
        options, pieces = self.options, self.options.shard_slice(option)
        if len(ranks) == 1:
            rank, piece = ranks[0], pieces.start
            self.load[:, rank] += sign * options.seconds[piece]
            self.rank_used[rank] += sign * options.rank_demand[piece]
            self.host_used[self._rank_hosts[rank]] += sign * options.host_demand[piece]
        elif len(ranks):
            np.add.at(self.load.T, ranks, sign * options.seconds[pieces])
            np.add.at(self.rank_used, ranks, sign * options.rank_demand[pieces])
            np.add.at(self.host_used, self._rank_hosts[ranks], sign * options.host_demand[pieces])

    def fits(self) -> bool:
        """Whether all ranks and hosts are within their memory limits."""
        return bool(
            (self.rank_used <= self.cluster.rank_capacity).all()
            and (self.host_used <= self.cluster.host_capacity).all()
        )

    def busiest_ranks(self) -> Ints:
        """Return the slowest rank of each component on a critical path, in ascending order."""
        counts, paths = self.load.any(axis=1), self.options.paths
        if paths is not None:
            each = paths.path_seconds(self.load.max(axis=1) + self.common_seconds, self.optional_counts > 0)
            counts &= (paths.coefs[each >= each.max() - CRITICAL_PATH_SHARE * abs(each.max())] > 0).any(axis=0)
        return np.unique(self.load.argmax(axis=1)[counts])

    def busiest_units(self) -> list[int]:
        """Return the units with a shard on one of the busiest ranks, the one with the most seconds first."""
        options = self.options
        busy = np.zeros(self.cluster.num_ranks, np.bool_)
        busy[self.busiest_ranks()] = True
        sizes = np.array([len(ranks) for ranks in self.ranks])
        owner = np.repeat(np.arange(options.num_units), sizes)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        on = np.flatnonzero(busy[np.concatenate(self.ranks)])
        pieces = options.first_shard[self.option[owner[on]]] + place[on]
        weights = options.common_s[self.option]
        np.maximum.at(weights, owner[on], options.shard_s[pieces])
        order = np.argsort(-weights, kind="stable")
        return [int(unit) for unit in order if weights[unit] > 0.0] or [0]

    def find_ranks(self, option: int, score: RankScore) -> Ints | None:
        """Return the available ranks with the lowest scores for the shards of an option, or `None` if there are not
        enough."""
        options, pieces = self.options, self.options.shard_slice(option)
        unit = int(options.unit_index[option])
        need = options.common_demand[option] - options.common_demand[self.counted_option[unit]]
        # Common costs need memory on all ranks.
        if (need > 0).any() and not (self.rank_used + need <= self.cluster.rank_capacity).all():
            return None
        mask = self.allowed_ranks(unit)
        if mask is not None and options.is_replicated[option] and not mask.all():
            return None
        size = pieces.stop - pieces.start
        if option in options.fixed_ranks:
            return self._check_fixed(pieces, need, options.fixed_ranks[option], mask)
        if not size:
            return np.zeros(0, np.int64)
        values = score(self, options.seconds[pieces])
        if options.block_size[option]:
            return self._find_blocks(option, need, values, mask)
        if size == 1 or not options.host_demand[pieces].any():
            return self._find_distinct_ranks(pieces, need, values, mask)
        return self._find_sequentially(pieces, need, values, mask)

    def allowed_ranks(self, unit: int) -> Mask | None:
        """Return the mask of ranks that a unit may use [R], or `None` if it may use all."""
        mask = self.options.allowed_ranks.get(unit)
        for other in self.options.conflicts.get(unit, ()):
            if self.option[other] >= 0:
                mask = np.full(self.cluster.num_ranks, True) if mask is None else mask.copy()
                mask &= not self.options.is_replicated[self.option[other]]
                mask[self.ranks[other]] = False
        return mask

    def _has_capacity(self, rank_need: Ints, host_need: Ints) -> Mask:
        machine = self.cluster
        room: Mask = self.rank_used[:, 0] <= machine.rank_capacity[:, 0] - rank_need[0]
        if rank_need[1]:
            room &= self.rank_used[:, 1] <= machine.rank_capacity[:, 1] - rank_need[1]
        if host_need.any():
            on_host: Mask = np.all(self.host_used <= machine.host_capacity - host_need, axis=1)
            room &= on_host[self._rank_hosts]
        return room

    def _find_distinct_ranks(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Find different ranks for shards without host memory, or for a single shard. The longest shard gets the best
        rank."""
        options, size = self.options, pieces.stop - pieces.start
        needs = options.rank_demand[pieces]
        room = self._has_capacity(needs.max(axis=0) + need, options.host_demand[pieces.start])
        if mask is not None:
            room &= mask
        if size == 1:
            values = np.where(room, values, np.inf)
            rank = int(values.argmin())
            return np.array([rank]) if room[rank] else None
        ranks = np.flatnonzero(room)
        if len(ranks) < size:
            return None
        ranks = ranks[np.argsort(values[ranks], kind="stable")[:size]]
        places = np.empty(size, np.int64)
        places[np.argsort(-options.shard_s[pieces], kind="stable")] = ranks
        return places

    def _check_fixed(self, pieces: slice, need: Ints, ranks: Ints, mask: Mask | None) -> Ints | None:
        rank_used, host_used = self.rank_used + need, self.host_used.copy()
        np.add.at(rank_used, ranks, self.options.rank_demand[pieces])
        np.add.at(host_used, self._rank_hosts[ranks], self.options.host_demand[pieces])
        room = (rank_used <= self.cluster.rank_capacity).all() and (host_used <= self.cluster.host_capacity).all()
        return ranks if room and (mask is None or mask[ranks].all()) else None

    def _find_sequentially(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        options = self.options
        before = self.host_used.copy()
        free = np.ones(self.cluster.num_ranks, np.bool_) if mask is None else mask.copy()
        places = np.empty(pieces.stop - pieces.start, np.int64)
        try:
            for piece in np.argsort(-options.shard_s[pieces], kind="stable"):
                index = pieces.start + piece
                room = self._has_capacity(options.rank_demand[index] + need, options.host_demand[index]) & free
                rank = int(np.where(room, values, np.inf).argmin())
                if not room[rank]:
                    return None
                places[piece], free[rank] = rank, False
                self.host_used[self._rank_hosts[rank]] += options.host_demand[index]
        finally:
            self.host_used = before
        return places

    def _find_blocks(self, option: int, common: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Find a host for each block of shards, and different ranks on it."""
        options, machine = self.options, self.cluster
        pieces, size, per_host = options.shard_slice(option), int(options.block_size[option]), machine.devices_per_host
        rank_used, host_used, values = self.rank_used.copy(), self.host_used.copy(), values.copy()
        places = []
        for start in range(pieces.start, pieces.stop, size):
            block = slice(start, start + size)
            need = options.rank_demand[block].max(axis=0) + common
            room = (rank_used <= machine.rank_capacity - need).all(axis=1)
            if mask is not None:
                room &= mask
            room &= (host_used <= machine.host_capacity - options.host_demand[block].sum(axis=0)).all(axis=1)[
                self._rank_hosts
            ]
            by_host = np.sort(np.where(room, values, np.inf).reshape(-1, per_host), axis=1)[:, :size]
            host = int(by_host[:, -1].argmin())  # The highest score among the ranks that the block would use.
            if not np.isfinite(by_host[host, -1]):
                return None
            host_scores = np.where(room, values, np.inf)[host * per_host : (host + 1) * per_host]
            ranks = host * per_host + np.argsort(host_scores, kind="stable")[:size]
            chosen = np.empty(size, np.int64)
            chosen[np.argsort(-options.shard_s[block], kind="stable")] = ranks
            values[chosen] += options.shard_s[block]
            rank_used[chosen] += options.rank_demand[block]
            host_used[host] += options.host_demand[block].sum(axis=0)
            places.append(chosen)
        return np.concatenate(places)


class RankScore:
    """Score for choosing ranks. Lower is better."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        """Return the score of each rank [R] for shards with the component seconds `seconds` [p, K]."""
        raise NotImplementedError


class BusySeconds(RankScore):
    """Score of the seconds that a rank has so far. Ranks whose exchange exceeds a limit are chosen last."""

    # The limit follows the greedy grid search of NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.4), which
    # bounds the columns of a device by several values, because they determine the exchange time.
    def __init__(self, exchange_limit_s: float = np.inf) -> None:
        self._limit_s = exchange_limit_s

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        options = assignment.options
        busy: Floats = options.weighted_seconds(assignment.load.T)
        if np.isfinite(self._limit_s):
            exchange = options.exchange_seconds(assignment.load.T) + options.exchange_seconds(seconds).max()
            busy = np.where(exchange > self._limit_s, busy + 1e9, busy)
        return busy


class AddedCost(RankScore):
    """Score of the cost with the largest shard added to the rank. Ties prefer the rank with the lowest load."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        added = assignment.load + seconds.max(axis=0)[:, None]
        busiest = assignment.load.max(axis=1, keepdims=True)
        return assignment.cost_with(np.maximum(added, busiest).T) + 1e-6 * assignment.options.weighted_seconds(added.T)


class UsedBytes(RankScore):
    """Score of the bytes in use on a rank's device."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        return assignment.rank_used[:, 0].astype(np.float64)
