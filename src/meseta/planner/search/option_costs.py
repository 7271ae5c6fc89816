"""An option for every unit at once: what balances least is cut, and what room is short of is paid for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meseta.planner.search.assignment import UNLIMITED, Floats, Ints, Mask
from meseta.planner.search.cost_estimator import NUM_AVOIDABLE
from meseta.planner.search.problem import PlacementProblem
from meseta.spec.tiers import TIERS

SHARD_TIME_SHARES = (0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 1.0, 2.0, np.inf)
"""Longest pieces that are tried, as parts of the seconds that a rank has on average."""
SHARD_CAPACITY_SHARES = (1.0, 0.5, 0.2)
"""Largest pieces that are tried where room is short, as parts of a device."""
MAX_UNITS_ALL_SHARES = 300
"""Of more units, large pieces are left out where collectives or memories are."""
MAX_FILL_SHARE = 0.93
"""Pieces leave corners: so much of all room can be filled before prices are put on it."""


class OptionCosts:
    """What every option of a problem takes, summed over its pieces."""

    def __init__(self, problem: PlacementProblem) -> None:
        options, machine = problem.options, problem.cluster
        self.unit_index, ranks = options.unit_index, machine.num_ranks
        self._starts = np.searchsorted(options.unit_index, np.arange(options.num_units))
        seconds = options.shard_s
        sums = _sum_by_option(
            np.column_stack([seconds, options.rank_demand[:, 0], options.host_demand]), options.first_shard
        )
        self.average_s = options.common_s + sums[:, 0] / ranks
        """[W]: seconds that an option adds to the average rank."""
        self.max_shard_s = _max_by_option(seconds, options.first_shard)
        """[W]: seconds of its longest piece."""
        self.num_bytes = sums[:, 1:] + np.outer(options.common_demand[:, 0] * ranks, [1, 0, 0])
        """[W, 3]: bytes that it takes of all devices, of all DRAM and of all disks."""
        self.max_shard_bytes = _max_by_option(options.rank_demand[:, 0].astype(np.float64), options.first_shard)
        """[W]: bytes of its largest piece on a device."""
        room = np.concatenate(
            [machine.rank_capacity[:, :1].sum(axis=0, dtype=np.float64), machine.host_capacity.sum(axis=0)]
        )
        self.capacity = np.where(room >= UNLIMITED, np.inf, room)
        """[3]: bytes of all devices, of all DRAM and of all disks."""
        self.device_capacity = float(machine.rank_capacity[0, 0])
        need = np.column_stack([options.rank_demand[:, 0], options.host_demand]).astype(np.float64)
        own_room = np.concatenate([machine.rank_capacity[0, :1], machine.host_capacity[0]]).astype(np.float64)
        shares = np.where(need > 0, need / np.maximum(own_room, 1e-9), 0.0).max(axis=1)
        self.max_capacity_share = _max_by_option(shares, options.first_shard)
        """[W]: the part of its device, or of its host's DRAM or disk, that the largest piece takes."""
        self.avoidable_costs = options.optional_costs[:, :NUM_AVOIDABLE]
        tiers = [0 if scheme is None else TIERS.index(scheme.tier) for scheme in problem.schemes]
        self.tier_index = np.array(tiers, np.int64)
        """[W]: index in TIERS."""

    def pick_cheapest(self, values: Floats, allowed: Mask, strict: Floats) -> Ints:
        """[U]: the option of least value among those allowed; of units without one, the option of the least
        `strict`."""
        worst = 2.0 * np.abs(values).max(initial=1.0) + 1.0
        scale = worst / max(float(strict.max(initial=0.0)), 1e-30)
        values = np.where(allowed, values, worst + strict * scale)
        least = np.minimum.reduceat(values, self._starts)
        hits = np.flatnonzero(values == least[self.unit_index])
        return hits[np.unique(self.unit_index[hits], return_index=True)[1]]

    def choose_options(self, allowed: Mask, limit_s: float, room_share: float) -> Ints:
        """[U]: the cheapest options on average whose pieces keep to a length and to a part of a device's room.

        Where these take more than the machines have, bytes get a price, which is raised until they fit: the relaxation
        of J. Lagrange for limits on sums (M. L. Fisher, Management Science 27, 1981).
        """
        fits = self.max_capacity_share <= room_share
        allowed = allowed & fits & (self.max_shard_s <= limit_s)
        strict = np.where(fits, self.max_shard_s, self.max_shard_s.max(initial=0.0) + self.max_capacity_share)
        price, cheaper = np.zeros(3), np.zeros(3)
        choice = self.pick_cheapest(self.average_s, allowed, strict)
        for tier in (0, 1, 2, 0, 1):
            if self.num_bytes[choice, tier].sum() <= MAX_FILL_SHARE * self.capacity[tier]:
                continue
            low, high = 0.0, 1e3 * self.average_s.sum() / max(self.num_bytes[:, tier].sum(), 1.0)
            for _ in range(30):
                price[tier] = 0.5 * (low + high)
                choice = self.pick_cheapest(self.average_s + self.num_bytes @ price, allowed, strict)
                fit = self.num_bytes[choice, tier].sum() <= MAX_FILL_SHARE * self.capacity[tier]
                low, high = (low, price[tier]) if fit else (price[tier], high)
            price[tier], cheaper[tier] = high, low
            choice = self.pick_cheapest(self.average_s + self.num_bytes @ price, allowed, strict)
        for scarce in np.flatnonzero(price):
            lower = np.where(np.arange(3) == scarce, cheaper, price)
            self._fill_up(choice, self.pick_cheapest(self.average_s + self.num_bytes @ lower, allowed, strict))
        return choice

    def _fill_up(self, choice: Ints, other: Ints) -> None:
        """Change to the options of `other`, which are cheaper and take too much, for as many units as there is room
        for: tables that are alike all change their option at the same price."""
        units = np.flatnonzero(choice != other)
        gain = self.average_s[choice[units]] - self.average_s[other[units]]
        more = self.num_bytes[other[units]] - self.num_bytes[choice[units]]
        left = MAX_FILL_SHARE * self.capacity - self.num_bytes[choice].sum(axis=0)
        for i in np.argsort(-gain / np.maximum(np.abs(more).max(axis=1), 1.0), kind="stable"):
            if gain[i] > 0.0 and (more[i] <= left).all():
                choice[units[i]] = other[units[i]]
                left -= more[i]

    def choices(self) -> Iterator[Ints]:
        """Different choices [U]: by longest piece, with and without collectives that some options need alone."""
        everything = np.ones(len(self.unit_index), np.bool_)
        seen = set()
        for number, allowed in enumerate(self._option_subsets(everything)):
            plain = self.choose_options(allowed, np.inf, 1.0)
            share_s = max(self.average_s[plain].sum(), 1e-12)
            is_short = self.num_bytes[plain, 0].sum() > 0.4 * self.capacity[0]
            is_short |= self.max_capacity_share[plain].max(initial=0.0) > 0.4
            room_shares = (
                SHARD_CAPACITY_SHARES
                if not number or len(plain) <= MAX_UNITS_ALL_SHARES
                else SHARD_CAPACITY_SHARES[1:2]
            )
            for share in SHARD_TIME_SHARES:
                for room_share in room_shares if is_short else SHARD_CAPACITY_SHARES[:1]:
                    choice = self.choose_options(allowed, share * share_s, room_share)
                    if choice.tobytes() not in seen:
                        seen.add(choice.tobytes())
                        yield choice

    def _option_subsets(self, everything: Mask) -> list[Mask]:
        """Options to choose from: all; without collectives that only some options need; with one more memory than
        devices."""
        palettes = [~self.avoidable_costs.any(axis=1)] + [
            self.avoidable_costs[:, k] == 0 for k in range(self.avoidable_costs.shape[1])
        ]
        on_device = self.tier_index == 0
        palettes += [on_device | (self.tier_index == tier) for tier in np.unique(self.tier_index[~on_device])]
        return [everything, *(allowed for allowed in palettes if not allowed.all())]


def _sum_by_option(values: Floats, first: Ints) -> Floats:
    """[W, k] from [n, k]: the sum over an option's pieces."""
    ends = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0, dtype=np.float64)])
    return ends[first[1:]] - ends[first[:-1]]


def _max_by_option(values: Floats, first: Ints) -> Floats:
    """[W] from [n]: the largest of an option's pieces; 0 without any."""
    found = np.zeros(len(first) - 1)
    np.maximum.at(found, np.repeat(np.arange(len(found)), np.diff(first)), values)
    return found
