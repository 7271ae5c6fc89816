"""Choice of one option per unit. Memory has a price if it is scarce."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meseta.planner.search.assignment import UNLIMITED, Floats, Ints, Mask
from meseta.planner.search.cost_estimator import NUM_AVOIDABLE
from meseta.planner.search.problem import PlacementProblem
from meseta.spec.tiers import TIERS

SHARD_TIME_SHARES = (0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 1.0, 2.0, np.inf)
"""Limits for the longest shard, relative to the average seconds of a rank."""
SHARD_CAPACITY_SHARES = (1.0, 0.5, 0.2)
"""Limits for the largest shard if memory is scarce, relative to the memory of a device."""
MAX_UNITS_ALL_SHARES = 300
"""Maximum number of units for which all of `SHARD_CAPACITY_SHARES` are combined with each subset of options."""
# Shards do not fill devices completely.
MAX_FILL_SHARE = 0.93
"""Share of the total memory that may be used before bytes have a price."""


class OptionCosts:
    """Costs of each option [W], summed over its shards."""

    def __init__(self, problem: PlacementProblem) -> None:
        options, machine = problem.options, problem.cluster
        self.unit_index, ranks = options.unit_index, machine.num_ranks
        self._starts = np.searchsorted(options.unit_index, np.arange(options.num_units))
        seconds = options.shard_s
        demands = np.column_stack([seconds, options.rank_demand[:, 0], options.host_demand])
        ends = np.vstack([np.zeros((1, demands.shape[1])), np.cumsum(demands, axis=0, dtype=np.float64)])
        sums = ends[options.first_shard[1:]] - ends[options.first_shard[:-1]]
        self.average_s = options.common_s + sums[:, 0] / ranks
        """Seconds that each option adds to the average rank [W]."""
        self.max_shard_s = _max_by_option(seconds, options.first_shard)
        """Seconds of the longest shard of each option [W]."""
        self.num_bytes = sums[:, 1:] + np.outer(options.common_demand[:, 0] * ranks, [1, 0, 0])
        """Bytes of each option in all devices, all DRAM and all disks [W, 3]."""
        self.max_shard_bytes = _max_by_option(options.rank_demand[:, 0].astype(np.float64), options.first_shard)
        """Device memory of the largest shard of each option [W]."""
        room = np.concatenate(
            [machine.rank_capacity[:, :1].sum(axis=0, dtype=np.float64), machine.host_capacity.sum(axis=0)]
        )
        self.capacity = np.where(room >= UNLIMITED, np.inf, room)
        """Total bytes of all devices, all DRAM and all disks [3]."""
        self.device_capacity = float(machine.rank_capacity[0, 0])
        need = np.column_stack([options.rank_demand[:, 0], options.host_demand]).astype(np.float64)
        own_room = np.concatenate([machine.rank_capacity[0, :1], machine.host_capacity[0]]).astype(np.float64)
        shares = np.where(need > 0, need / np.maximum(own_room, 1e-9), 0.0).max(axis=1)
        self.max_capacity_share = _max_by_option(shares, options.first_shard)
        """Share of a device, or of the DRAM or disk of a host, that the largest shard of each option needs [W]."""
        self.avoidable_costs = options.optional_costs[:, :NUM_AVOIDABLE]
        tiers = [0 if scheme is None else TIERS.index(scheme.tier) for scheme in problem.schemes]
        self.tier_index = np.array(tiers, np.int64)  # [W]: index in `TIERS`

    def pick_cheapest(self, values: Floats, allowed: Mask, strict: Floats) -> Ints:
        """Return the allowed option with the lowest value for each unit [U]. Units without an allowed option get the
        one with the lowest value in `strict`."""
        worst = 2.0 * np.abs(values).max(initial=1.0) + 1.0
        scale = worst / max(float(strict.max(initial=0.0)), 1e-30)
        values = np.where(allowed, values, worst + strict * scale)
        least = np.minimum.reduceat(values, self._starts)
        hits = np.flatnonzero(values == least[self.unit_index])
        return hits[np.unique(self.unit_index[hits], return_index=True)[1]]

    def choose_options(self, allowed: Mask, limit_s: float, room_share: float) -> Ints:
        """Return the cheapest option of each unit [U] whose shards take at most `limit_s` seconds and the share
        `room_share` of a device."""
        fits = self.max_capacity_share <= room_share
        allowed = allowed & fits & (self.max_shard_s <= limit_s)
        strict = np.where(fits, self.max_shard_s, self.max_shard_s.max(initial=0.0) + self.max_capacity_share)
        # If the choice needs more bytes than the machines have, bytes get a price, which rises until the choice fits.
        # This is Lagrangian relaxation (M. L. Fisher, Management Science 27, 1981).
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
        """Change as many units in `choice` to their cheaper option in `other` as memory allows."""
        # Equal tables all change their option at the same price, so the choice at the higher price leaves memory free.
        units = np.flatnonzero(choice != other)
        gain = self.average_s[choice[units]] - self.average_s[other[units]]
        more = self.num_bytes[other[units]] - self.num_bytes[choice[units]]
        left = MAX_FILL_SHARE * self.capacity - self.num_bytes[choice].sum(axis=0)
        for i in np.argsort(-gain / np.maximum(np.abs(more).max(axis=1), 1.0), kind="stable"):
            if gain[i] > 0.0 and (more[i] <= left).all():
                choice[units[i]] = other[units[i]]
                left -= more[i]

    def choices(self) -> Iterator[Ints]:
        """Yield choices [U] with different limits of the longest shard, and with and without optional collectives."""
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
        """Return masks of options: all, those without optional collectives, and those with one memory in addition to
        devices."""
        palettes = [~self.avoidable_costs.any(axis=1)] + [
            self.avoidable_costs[:, k] == 0 for k in range(self.avoidable_costs.shape[1])
        ]
        on_device = self.tier_index == 0
        palettes += [on_device | (self.tier_index == tier) for tier in np.unique(self.tier_index[~on_device])]
        return [everything, *(allowed for allowed in palettes if not allowed.all())]


def _max_by_option(values: Floats, first: Ints) -> Floats:
    """Return the maximum over the shards of each option [W] of values [n], or 0 without shards."""
    maxima = np.zeros(len(first) - 1)
    np.maximum.at(maxima, np.repeat(np.arange(len(maxima)), np.diff(first)), values)
    return maxima
