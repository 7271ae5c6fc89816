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

NO_LIMIT = 2**62
"""Room where nothing is checked."""
CLOSE = 0.01
"""Paths that are shorter than the longest by no more than this share of it are looked at with it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Room on ranks and on their hosts; rank r is device r % devices_per_host of host r // devices_per_host."""

    devices_per_host: int
    """Ranks of one host."""
    rank_room: Ints
    """[R, 2]: bytes of each device, and tables that it may hold."""
    host_room: Ints
    """[H, 2]: bytes of DRAM and of disk of each host."""

    @property
    def num_ranks(self) -> int:
        return len(self.rank_room)


@dataclass(frozen=True, kw_only=True)
class StepPaths:
    """P sums of components, the longest of which is the step: what is hidden behind others is on another path."""

    coefs: Floats
    """[P, K]: how often a path meets each component."""
    fixed_s: Floats
    """[P]: seconds of a path, beside those of a step without any table."""
    use_s: Floats
    """[P, C]: seconds of a path where something is used."""
    needs: Mask
    """[P, C]: what has to be used for a path to be there."""
    weights: Floats
    """[K]: what a second of each component is worth while nobody knows which path is the longest."""

    def each(self, seconds: Floats, is_used: Mask) -> Floats:
        """[..., P]: seconds of every path, from those of components [..., K] and what is used [..., C]."""
        is_missing = ~is_used @ self.needs.T
        of_uses = np.where(is_missing, -np.inf, is_used @ self.use_s.T + self.fixed_s)
        found: Floats = seconds @ self.coefs.T + of_uses
        return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of all units, one after the other; W options with n pieces together.

    Unit 0 may be whole or cut in two, unit 1 whole or on every rank, W = 4 and n = 4:

        option       0     1        2     3
        unit         0     0        1     1
        first        0     1        3     4     4
        piece        0     1  2     3
        everywhere   no    no       no    yes
    """

    unit: Ints
    """[W]: the unit that an option cuts, ascending."""
    first: Ints
    """[W + 1]: option w has the pieces first[w]..first[w + 1] - 1, which lie on different ranks within a block."""
    block: Ints
    """[W]: so many pieces in a row share a host; 0: all may lie anywhere, on different ranks."""
    common_seconds: Floats
    """[W, K]: seconds that every rank spends on an option."""
    common_need: Ints
    """[W, 2]: room that every rank gives to an option."""
    everywhere: Mask
    """[W]: whether every rank holds replicas."""
    uses: Ints
    """[W, C]: 1 where an option needs a collective that is not needed otherwise."""
    use_s: Floats
    """[C]: seconds of each of these collectives, however many units need it."""
    seconds: Floats
    """[n, K]: seconds of the rank that holds a piece."""
    rank_need: Ints
    """[n, 2]: room that a piece needs on its rank."""
    host_need: Ints
    """[n, 2]: room that a piece needs on its host."""
    fixed: Mapping[int, Ints] = field(default_factory=dict)
    """By option: the ranks of its pieces, where these are given."""
    allowed: Mapping[int, Mask] = field(default_factory=dict)
    """By unit: the ranks [R] that it may lie on, where these are not all."""
    apart: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By unit: units that must not share a rank with it."""
    paths: StepPaths | None = None
    """What a step is the longest of; None: the sum of all components."""

    def step_s(self, busy: Floats, common: Floats, is_used: Mask) -> Floats:
        """[...]: seconds of a step, beside what is fixed, from those of the slowest rank [..., K], of every rank
        [..., K], and what is used [..., C]."""
        if self.paths is None:
            return np.asarray(busy.sum(axis=-1) + (common.sum(axis=-1) + is_used @ self.use_s))
        return np.asarray(self.paths.each(busy + common, is_used).max(axis=-1))

    def weighed(self, seconds: Floats) -> Floats:
        """[...]: what seconds of components [..., K] are worth, added up."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds @ self.paths.weights

    def exchanged(self, seconds: Floats) -> Floats:
        """[...]: the same of exchanges alone."""
        first = self.num_compute
        if self.paths is None:
            return seconds[..., first:].sum(axis=-1)
        return seconds[..., first:] @ self.paths.weights[first:]

    def spent(self, seconds: Floats) -> Floats:
        """[...]: all that ranks do and wait for, were nothing hidden, of seconds of components [..., K]."""
        if self.paths is None:
            return seconds.sum(axis=-1)
        return seconds[..., 0] + seconds[..., self.num_compute :].sum(axis=-1)

    @property
    def num_compute(self) -> int:
        """Components that ranks compute in, see `pricing.COMPONENTS` and `paths.COMPUTE`."""
        return 1 if self.paths is None else 3

    @cached_property
    def piece_s(self) -> Floats:
        """[n]: what each piece is worth on its rank."""
        return self.weighed(self.seconds)

    @cached_property
    def common_s(self) -> Floats:
        """[W]: what each option is worth on every rank."""
        return self.weighed(self.common_seconds)

    @cached_property
    def owner(self) -> Ints:
        """[n]: the option that a piece is of."""
        return np.repeat(np.arange(len(self.unit)), np.diff(self.first))

    @cached_property
    def total(self) -> Floats:
        """[W, K]: the sum of each component over an option's pieces."""
        found = np.zeros_like(self.common_seconds)
        np.add.at(found, self.owner, self.seconds)
        return found

    @property
    def num_units(self) -> int:
        return int(self.unit[-1]) + 1 if len(self.unit) else 0

    @cached_property
    def longest(self) -> Floats:
        """[W, K]: the largest of each component over an option's pieces; 0 without any."""
        found = np.zeros_like(self.common_seconds)
        np.maximum.at(found, self.owner, self.seconds)
        return found

    def of_unit(self, unit: int) -> range:
        """The options of one unit."""
        return range(*(int(end) for end in np.searchsorted(self.unit, [unit, unit + 1])))

    def pieces(self, option: int) -> slice:
        """The pieces of one option."""
        return slice(int(self.first[option]), int(self.first[option + 1]))


class Assignment:
    """Units with their options and ranks, and what every rank carries by that; the one object here that changes."""

    def __init__(self, options: Options, machine: Machine, choice: Ints) -> None:
        """Nothing is placed yet, but what units cost every rank is counted, as if in the options of `choice` [U]."""
        self.options, self.machine = options, machine
        self.counted = choice.copy()
        """[U]: the option by which a unit's common seconds and room are counted, placed or not."""
        self.common = options.common_seconds[choice].sum(axis=0)
        """[K]: seconds of every rank."""
        self.uses = options.uses[choice].sum(axis=0)
        """[C]: units that need each collective."""
        self.option = np.full(options.num_units, -1, np.int64)
        """[U]: the option of each unit; -1: not placed."""
        self.ranks: list[Ints] = [np.zeros(0, np.int64)] * options.num_units
        """By unit: the rank of each of its pieces."""
        self.load = np.zeros((options.seconds.shape[1], machine.num_ranks))
        """[K, R]: seconds."""
        self.rank_used = np.zeros_like(machine.rank_room) + options.common_need[choice].sum(axis=0)
        self.host_used = np.zeros_like(machine.host_room)
        self._host_of = np.arange(machine.num_ranks) // machine.devices_per_host

    def copy(self) -> Assignment:
        """Another assignment that may change by itself."""
        other = Assignment.__new__(Assignment)
        other.options, other.machine, other._host_of = self.options, self.machine, self._host_of
        other.counted, other.common, other.uses = self.counted.copy(), self.common.copy(), self.uses.copy()
        other.option, other.ranks, other.load = self.option.copy(), list(self.ranks), self.load.copy()
        other.rank_used, other.host_used = self.rank_used.copy(), self.host_used.copy()
        return other

    @property
    def cost(self) -> float:
        """Seconds of a step: each component ends with its slowest rank."""
        return float(self.options.step_s(self.load.max(axis=1), self.common, self.uses > 0))

    def cost_of(self, busy: Floats) -> Floats:
        """[...]: the same, were the slowest rank of each component so busy [..., K]; without what is common, where all
        is added up."""
        if self.options.paths is None:
            added: Floats = busy.sum(axis=-1)
            return added
        return self.options.step_s(busy, self.common, self.uses > 0)

    @property
    def spread(self) -> float:
        """Tells assignments of equal cost apart: the sum of squares falls as the load of any busy rank falls."""
        return float(np.square(self.load).sum())

    def add(self, option: int, ranks: Ints) -> None:
        """Place a unit."""
        self._change(option, ranks, 1)
        unit = int(self.options.unit[option])
        self.option[unit], self.ranks[unit] = option, ranks
        self.count(unit, option)

    def count(self, unit: int, option: int) -> None:
        """Count what a unit costs every rank by another option."""
        before = int(self.counted[unit])
        if before != option:
            options = self.options
            self.common += options.common_seconds[option] - options.common_seconds[before]
            self.rank_used += options.common_need[option] - options.common_need[before]
            self.uses += options.uses[option] - options.uses[before]
            self.counted[unit] = option

    def remove(self, unit: int) -> tuple[int, Ints]:
        """Take a unit away; returns where it was, for `add`."""
        option, ranks = int(self.option[unit]), self.ranks[unit]
        self._change(option, ranks, -1)
        self.option[unit] = -1
        return option, ranks

    def _change(self, option: int, ranks: Ints, sign: int) -> None:
        options, pieces = self.options, self.options.pieces(option)
        if len(ranks) == 1:
            rank, piece = ranks[0], pieces.start
            self.load[:, rank] += sign * options.seconds[piece]
            self.rank_used[rank] += sign * options.rank_need[piece]
            self.host_used[self._host_of[rank]] += sign * options.host_need[piece]
        elif len(ranks):
            np.add.at(self.load.T, ranks, sign * options.seconds[pieces])
            np.add.at(self.rank_used, ranks, sign * options.rank_need[pieces])
            np.add.at(self.host_used, self._host_of[ranks], sign * options.host_need[pieces])

    def fits(self) -> bool:
        """Whether no rank and no host holds more than it has room for."""
        return bool(
            (self.rank_used <= self.machine.rank_room).all() and (self.host_used <= self.machine.host_room).all()
        )

    def busiest_ranks(self) -> Ints:
        """Ranks that end some component last, ascending; none that is hidden."""
        counts, paths = self.load.any(axis=1), self.options.paths
        if paths is not None:
            each = paths.each(self.load.max(axis=1) + self.common, self.uses > 0)
            counts &= (paths.coefs[each >= each.max() - CLOSE * abs(each.max())] > 0).any(axis=0)
        return np.unique(self.load.argmax(axis=1)[counts])

    def busiest_units(self) -> list[int]:
        """Units with a piece on a rank that ends some component last, those with most seconds there first."""
        options = self.options
        busy = np.zeros(self.machine.num_ranks, np.bool_)
        busy[self.busiest_ranks()] = True
        sizes = np.array([len(ranks) for ranks in self.ranks])
        owner = np.repeat(np.arange(options.num_units), sizes)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        on = np.flatnonzero(busy[np.concatenate(self.ranks)])
        pieces = options.first[self.option[owner[on]]] + place[on]
        weights = options.common_s[self.option]
        np.maximum.at(weights, owner[on], options.piece_s[pieces])
        order = np.argsort(-weights, kind="stable")
        return [int(unit) for unit in order if weights[unit] > 0.0] or [0]

    def find(self, option: int, score: Score) -> Ints | None:
        """Ranks for the pieces of an option, the least by `score` that have room; None where there are none."""
        options, pieces = self.options, self.options.pieces(option)
        unit = int(options.unit[option])
        need = options.common_need[option] - options.common_need[self.counted[unit]]
        if (need > 0).any() and not (self.rank_used + need <= self.machine.rank_room).all():
            return None
        mask = self.mask(unit)
        if mask is not None and options.everywhere[option] and not mask.all():
            return None
        size = pieces.stop - pieces.start
        if option in options.fixed:
            return self._check_fixed(pieces, need, options.fixed[option], mask)
        if not size:
            return np.zeros(0, np.int64)
        values = score(self, options.seconds[pieces])
        if options.block[option]:
            return self._find_blocks(option, need, values, mask)
        if size == 1 or not options.host_need[pieces].any():
            return self._find_apart(pieces, need, values, mask)
        return self._find_one_by_one(pieces, need, values, mask)

    def mask(self, unit: int) -> Mask | None:
        """Ranks [R] that a unit may lie on; None: all."""
        mask = self.options.allowed.get(unit)
        for other in self.options.apart.get(unit, ()):
            if self.option[other] >= 0:
                mask = np.full(self.machine.num_ranks, True) if mask is None else mask.copy()
                mask &= not self.options.everywhere[self.option[other]]
                mask[self.ranks[other]] = False
        return mask

    def _room(self, rank_need: Ints, host_need: Ints) -> Mask:
        """Ranks [R] with room for a piece."""
        machine = self.machine
        room: Mask = self.rank_used[:, 0] <= machine.rank_room[:, 0] - rank_need[0]
        if rank_need[1]:
            room &= self.rank_used[:, 1] <= machine.rank_room[:, 1] - rank_need[1]
        if host_need.any():
            on_host: Mask = np.all(self.host_used <= machine.host_room - host_need, axis=1)
            room &= on_host[self._host_of]
        return room

    def _find_apart(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Different ranks for pieces that take no room on hosts, or for one piece; the longest on the least."""
        options, size = self.options, pieces.stop - pieces.start
        needs = options.rank_need[pieces]
        room = self._room(needs.max(axis=0) + need, options.host_need[pieces.start])
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
        places[np.argsort(-options.piece_s[pieces], kind="stable")] = ranks
        return places

    def _check_fixed(self, pieces: slice, need: Ints, ranks: Ints, mask: Mask | None) -> Ints | None:
        """The given ranks, if they have room."""
        rank_used, host_used = self.rank_used + need, self.host_used.copy()
        np.add.at(rank_used, ranks, self.options.rank_need[pieces])
        np.add.at(host_used, self._host_of[ranks], self.options.host_need[pieces])
        room = (rank_used <= self.machine.rank_room).all() and (host_used <= self.machine.host_room).all()
        return ranks if room and (mask is None or mask[ranks].all()) else None

    def _find_one_by_one(self, pieces: slice, need: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """Different ranks for pieces that fill their hosts as well."""
        options = self.options
        before = self.host_used.copy()
        free = np.ones(self.machine.num_ranks, np.bool_) if mask is None else mask.copy()
        places = np.empty(pieces.stop - pieces.start, np.int64)
        try:
            for piece in np.argsort(-options.piece_s[pieces], kind="stable"):
                index = pieces.start + piece
                room = self._room(options.rank_need[index] + need, options.host_need[index]) & free
                rank = int(np.where(room, values, np.inf).argmin())
                if not room[rank]:
                    return None
                places[piece], free[rank] = rank, False
                self.host_used[self._host_of[rank]] += options.host_need[index]
        finally:
            self.host_used = before
        return places

    def _find_blocks(self, option: int, common: Ints, values: Floats, mask: Mask | None) -> Ints | None:
        """For each block of pieces the host whose least ranks score least, among those with room for the block."""
        options, machine = self.options, self.machine
        pieces, size, per_host = options.pieces(option), int(options.block[option]), machine.devices_per_host
        rank_used, host_used, values = self.rank_used.copy(), self.host_used.copy(), values.copy()
        places = []
        for start in range(pieces.start, pieces.stop, size):
            block = slice(start, start + size)
            need = options.rank_need[block].max(axis=0) + common
            room = (rank_used <= machine.rank_room - need).all(axis=1)
            if mask is not None:
                room &= mask
            room &= (host_used <= machine.host_room - options.host_need[block].sum(axis=0)).all(axis=1)[self._host_of]
            by_host = np.sort(np.where(room, values, np.inf).reshape(-1, per_host), axis=1)[:, :size]
            host = int(by_host[:, -1].argmin())  # the busiest of the ranks that the block would take
            if not np.isfinite(by_host[host, -1]):
                return None
            mine = np.where(room, values, np.inf)[host * per_host : (host + 1) * per_host]
            ranks = host * per_host + np.argsort(mine, kind="stable")[:size]
            chosen = np.empty(size, np.int64)
            chosen[np.argsort(-options.piece_s[block], kind="stable")] = ranks
            values[chosen] += options.piece_s[block]
            rank_used[chosen] += options.rank_need[block]
            host_used[host] += options.host_need[block].sum(axis=0)
            places.append(chosen)
        return np.concatenate(places)


class Score:
    """What a rank is chosen by: the lowest is taken."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        """[R], for pieces of `seconds` [p, K]."""
        raise NotImplementedError


class BusySeconds(Score):
    """The seconds that a rank carries so far; of ranks whose exchange passes a limit, none before all others.

    Source of the limit: the greedy grid search of NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.4), which
    bounds the columns of a device by each of a few values, since they decide how long the exchange takes.
    """

    def __init__(self, exchange_limit_s: float = np.inf) -> None:
        self._limit_s = exchange_limit_s

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        options = assignment.options
        busy: Floats = options.weighed(assignment.load.T)
        if np.isfinite(self._limit_s):
            exchange = options.exchanged(assignment.load.T) + options.exchanged(seconds).max()
            busy = np.where(exchange > self._limit_s, busy + 1e9, busy)
        return busy


class AddedCost(Score):
    """The cost of the assignment with the largest piece on the rank; of equal ones, the rank that carries least."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        added = assignment.load + seconds.max(axis=0)[:, None]
        busiest = assignment.load.max(axis=1, keepdims=True)
        return assignment.cost_of(np.maximum(added, busiest).T) + 1e-6 * assignment.options.weighed(added.T)


class UsedBytes(Score):
    """The bytes that a rank's device holds: the option out where room is scarce."""

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        return assignment.rank_used[:, 0].astype(np.float64)
