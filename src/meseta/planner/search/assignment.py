"""Pieces of tables on ranks, as arrays: what the search works on. Tables and schemes are numbers here.

A unit is a table, or several that must stay together. An option is one manner to cut a unit: pieces that need places,
and perhaps replicas that every rank holds. Seconds come in K components, each of which ends with its slowest rank: an
assignment costs the sum over components of the maximum over ranks; where some are hidden behind others, the longest of
several such sums.
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

UNLIMITED = 2**62
"""Room where nothing is checked."""
CRITICAL_PATH_SHARE = 0.01
"""Paths that are shorter than the longest by no more than this share of it are looked at with it."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Room on ranks and on their hosts; rank r is device r % devices_per_host of host r // devices_per_host."""

    devices_per_host: int
    """Ranks of one host."""
    rank_capacity: Ints
    """[R, 2]: bytes of each device, and tables that it may hold."""
    host_capacity: Ints
    """[H, 2]: bytes of DRAM and of disk of each host."""

    @property
    def num_ranks(self) -> int:
        return len(self.rank_capacity)


@dataclass(frozen=True, kw_only=True)
class StepPaths:
    """P sums of components, the longest of which is the step: what is hidden behind others is on another path."""

    coefs: Floats
    """[P, K]: how often a path meets each component."""
    fixed_s: Floats
    """[P]: seconds of a path, beside those of a step without any table."""
    optional_s: Floats
    """[P, C]: seconds of a path where something is used."""
    required_costs: Mask
    """[P, C]: what has to be used for a path to be there."""
    weights: Floats
    """[K]: what a second of each component is worth while nobody knows which path is the longest."""

    def path_seconds(self, seconds: Floats, is_used: Mask) -> Floats:
        """[..., P]: seconds of every path, from those of components [..., K] and what is used [..., C]."""
        is_missing = ~is_used @ self.required_costs.T
        of_uses = np.where(is_missing, -np.inf, is_used @ self.optional_s.T + self.fixed_s)
        found: Floats = seconds @ self.coefs.T + of_uses
        return found


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """All options of all units, one after the other; W options with n pieces together.

    Unit 0 may be whole or cut in two, unit 1 whole or on every rank, W = 4 and n = 4:

        option       0     1        2     3
        unit         0     0        1     1
        first        0     1        3     4     4
        piece        0     1  2     3
        everywhere   no    no       no    yes
    """

    unit_index: Ints
    """[W]: the unit that an option cuts, ascending."""
    first_shard: Ints
    """[W + 1]: option w has the pieces first[w]..first[w + 1] - 1, which lie on different ranks within a block."""
    block_size: Ints
    """[W]: so many pieces in a row share a host; 0: all may lie anywhere, on different ranks."""
    common_seconds: Floats
    """[W, K]: seconds that every rank spends on an option."""
    common_demand: Ints
    """[W, 2]: room that every rank gives to an option."""
    is_replicated: Mask
    """[W]: whether every rank holds replicas."""
    optional_costs: Ints
    """[W, C]: 1 where an option needs a collective that is not needed otherwise."""
    optional_s: Floats
    """[C]: seconds of each of these collectives, however many units need it."""
    seconds: Floats
    """[n, K]: seconds of the rank that holds a piece."""
    rank_demand: Ints
    """[n, 2]: room that a piece needs on its rank."""
    host_demand: Ints
    """[n, 2]: room that a piece needs on its host."""
    fixed_ranks: Mapping[int, Ints] = field(default_factory=dict)
    """By option: the ranks of its pieces, where these are given."""
    allowed_ranks: Mapping[int, Mask] = field(default_factory=dict)
    """By unit: the ranks [R] that it may lie on, where these are not all."""
    conflicts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By unit: units that must not share a rank with it."""
    paths: StepPaths | None = None
    """What a step is the longest of; None: the sum of all components."""

    def step_s(self, busy: Floats, common: Floats, is_used: Mask) -> Floats:
        """[...]: seconds of a step, beside what is fixed, from those of the slowest rank [..., K], of every rank
        [..., K], and what is used [..., C]."""
        if self.paths is None:
            return np.asarray(busy.sum(axis=-1) + (common.sum(axis=-1) + is_used @ self.optional_s))
        return np.asarray(self.paths.path_seconds(busy + common, is_used).max(axis=-1))

    def weighted_seconds(self, seconds: Floats) -> Floats:
        """[...]: what seconds of components [..., K] are worth, added up."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds @ self.paths.weights

    def exchange_seconds(self, seconds: Floats) -> Floats:
        """[...]: the same of exchanges alone."""
        first = self.num_compute_components
        if self.paths is None:
            return seconds[..., first:].sum(axis=-1)
        return seconds[..., first:] @ self.paths.weights[first:]

    def unoverlapped_seconds(self, seconds: Floats) -> Floats:
        """[...]: all that ranks do and wait for, were nothing hidden, of seconds of components [..., K]."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds[..., 0] + seconds[..., self.num_compute_components :].sum(axis=-1)

    @property
    def num_compute_components(self) -> int:
        """Components that ranks compute in, see `COST_COMPONENTS` and `COMPUTE_COMPONENTS`."""
        return 1 if self.paths is None else 3

    @cached_property
    def shard_s(self) -> Floats:
        """[n]: what each piece is worth on its rank."""
        return self.weighted_seconds(self.seconds)

    @cached_property
    def common_s(self) -> Floats:
        """[W]: what each option is worth on every rank."""
        return self.weighted_seconds(self.common_seconds)

    @cached_property
    def option_of_shard(self) -> Ints:
        """[n]: the option that a piece is of."""
        return np.repeat(np.arange(len(self.unit_index)), np.diff(self.first_shard))

    @cached_property
    def total_seconds(self) -> Floats:
        """[W, K]: the sum of each component over an option's pieces."""
        found = np.zeros_like(self.common_seconds)
        np.add.at(found, self.option_of_shard, self.seconds)
        return found

    @property
    def num_units(self) -> int:
        return int(self.unit_index[-1]) + 1 if len(self.unit_index) else 0

    @cached_property
    def max_seconds(self) -> Floats:
        """[W, K]: the largest of each component over an option's pieces; 0 without any."""
        found = np.zeros_like(self.common_seconds)
        np.maximum.at(found, self.option_of_shard, self.seconds)
        return found

    def unit_options(self, unit: int) -> range:
        """The options of one unit."""
        return range(*(int(end) for end in np.searchsorted(self.unit_index, [unit, unit + 1])))

    def shard_slice(self, option: int) -> slice:
        """The pieces of one option."""
        return slice(int(self.first_shard[option]), int(self.first_shard[option + 1]))


class Assignment:
    """Units with their options and ranks, and what every rank carries by that; the one object here that changes."""

    def __init__(self, options: ShardingOptions, machine: Cluster, choice: Ints) -> None:
        """Nothing is placed yet, but what units cost every rank is counted, as if in the options of `choice` [U]."""
        self.options, self.cluster = options, machine
        self.counted_option = choice.copy()
        """[U]: the option by which a unit's common seconds and room are counted, placed or not."""
        self.common_seconds = options.common_seconds[choice].sum(axis=0)
        """[K]: seconds of every rank."""
        self.optional_counts = options.optional_costs[choice].sum(axis=0)
        """[C]: units that need each collective."""
        self.option = np.full(options.num_units, -1, np.int64)
        """[U]: the option of each unit; -1: not placed."""
        self.ranks: list[Ints] = [np.zeros(0, np.int64)] * options.num_units
        """By unit: the rank of each of its pieces."""
        self.load = np.zeros((options.seconds.shape[1], machine.num_ranks))
        """[K, R]: seconds."""
        self.rank_used = np.zeros_like(machine.rank_capacity) + options.common_demand[choice].sum(axis=0)
        self.host_used = np.zeros_like(machine.host_capacity)
        self._rank_hosts = np.arange(machine.num_ranks) // machine.devices_per_host

    def copy(self) -> Assignment:
        """Another assignment that may change by itself."""
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
        """Seconds of a step: each component ends with its slowest rank."""
        return float(self.options.step_s(self.load.max(axis=1), self.common_seconds, self.optional_counts > 0))

    def cost_with(self, busy: Floats) -> Floats:
        """[...]: the same, were the slowest rank of each component so busy [..., K]; without what is common, where all
        is added up."""
        if self.options.paths is None:
            added: Floats = busy.sum(axis=-1)
            return added
        return self.options.step_s(busy, self.common_seconds, self.optional_counts > 0)

    @property
    def tie_breaker(self) -> float:
        """Tells assignments of equal cost apart: the sum of squares falls as the load of any busy rank falls."""
        return float(np.square(self.load).sum())

    def place(self, option: int, ranks: Ints) -> None:
        """Place a unit."""
        self._apply(option, ranks, 1)
        unit = int(self.options.unit_index[option])
        self.option[unit], self.ranks[unit] = option, ranks
        self.count_option(unit, option)

    def count_option(self, unit: int, option: int) -> None:
        """Count what a unit costs every rank by another option."""
        before = int(self.counted_option[unit])
        if before != option:
            options = self.options
            self.common_seconds += options.common_seconds[option] - options.common_seconds[before]
            self.rank_used += options.common_demand[option] - options.common_demand[before]
            self.optional_counts += options.optional_costs[option] - options.optional_costs[before]
            self.counted_option[unit] = option

    def remove(self, unit: int) -> tuple[int, Ints]:
        """Take a unit away; returns where it was, for `add`."""
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
        """Whether no rank and no host holds more than it has room for."""
        return bool(
            (self.rank_used <= self.cluster.rank_capacity).all()
            and (self.host_used <= self.cluster.host_capacity).all()
        )

    def busiest_ranks(self) -> Ints:
        """Ranks that end some component last, ascending; none that is hidden."""
        counts, paths = self.load.any(axis=1), self.options.paths
        if paths is not None:
            each = paths.path_seconds(self.load.max(axis=1) + self.common_seconds, self.optional_counts > 0)
            counts &= (paths.coefs[each >= each.max() - CRITICAL_PATH_SHARE * abs(each.max())] > 0).any(axis=0)
        return np.unique(self.load.argmax(axis=1)[counts])

    def busiest_units(self) -> list[int]:
        """Units with a piece on a rank that ends some component last, those with most seconds there first."""
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
        """Ranks for the pieces of an option, the least by `score` that have room; None where there are none."""
        options, pieces = self.options, self.options.shard_slice(option)
        unit = int(options.unit_index[option])
        need = options.common_demand[option] - options.common_demand[self.counted_option[unit]]
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
        """Ranks [R] that a unit may lie on; None: all."""
        mask = self.options.allowed_ranks.get(unit)
        for other in self.options.conflicts.get(unit, ()):
            if self.option[other] >= 0:
                mask = np.full(self.cluster.num_ranks, True) if mask is None else mask.copy()
                mask &= not self.options.is_replicated[self.option[other]]
                mask[self.ranks[other]] = False
        return mask

    def _has_capacity(self, rank_need: Ints, host_need: Ints) -> Mask:
        """Ranks [R] with room for a piece."""
        machine = self.cluster
        room: Mask = self.rank_used[:, 0] <= machine.rank_capacity[:, 0] - rank_need[0]
        if rank_need[1]:
            room &= self.rank_used[:, 1] <= machine.rank_capacity[:, 1] - rank_need[1]
        if host_need.any():
            on_host: Mask = np.all(self.host_used <= machine.host_capacity - host_need, axis=1)
            room &= on_host[self._rank_hosts]
        return room

    def _find_distinct_ranks(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Different ranks for pieces that take no room on hosts, or for one piece; the longest on the least."""
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
        """The given ranks, if they have room."""
        rank_used, host_used = self.rank_used + need, self.host_used.copy()
        np.add.at(rank_used, ranks, self.options.rank_demand[pieces])
        np.add.at(host_used, self._rank_hosts[ranks], self.options.host_demand[pieces])
        room = (rank_used <= self.cluster.rank_capacity).all() and (host_used <= self.cluster.host_capacity).all()
        return ranks if room and (mask is None or mask[ranks].all()) else None

    def _find_sequentially(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Different ranks for pieces that fill their hosts as well."""
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
        """For each block of pieces the host whose least ranks score least, among those with room for the block."""
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
            host = int(by_host[:, -1].argmin())  # the busiest of the ranks that the block would take
            if not np.isfinite(by_host[host, -1]):
                return None
            mine = np.where(room, values, np.inf)[host * per_host : (host + 1) * per_host]
            ranks = host * per_host + np.argsort(mine, kind="stable")[:size]
            chosen = np.empty(size, np.int64)
            chosen[np.argsort(-options.shard_s[block], kind="stable")] = ranks
            values[chosen] += options.shard_s[block]
            rank_used[chosen] += options.rank_demand[block]
            host_used[host] += options.host_demand[block].sum(axis=0)
            places.append(chosen)
        return np.concatenate(places)


class RankScore:
    """What a rank is chosen by: the lowest is taken."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        """[R], for pieces of `seconds` [p, K]."""
        raise NotImplementedError


class BusySeconds(RankScore):
    """The seconds that a rank carries so far; of ranks whose exchange passes a limit, none before all others.

    Source of the limit: the greedy grid search of NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.4), which
    bounds the columns of a device by each of a few values, since they decide how long the exchange takes.
    """

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
    """The cost of the assignment with the largest piece on the rank; of equal ones, the rank that carries least."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        added = assignment.load + seconds.max(axis=0)[:, None]
        busiest = assignment.load.max(axis=1, keepdims=True)
        return assignment.cost_with(np.maximum(added, busiest).T) + 1e-6 * assignment.options.weighted_seconds(added.T)


class UsedBytes(RankScore):
    """The bytes that a rank's device holds: the option out where room is scarce."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        return assignment.rank_used[:, 0].astype(np.float64)
