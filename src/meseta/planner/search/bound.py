"""Seconds below which no plan of the same schemes can go, whatever the search missed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meseta.planner.search.assignment import Floats, Mask
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.paths import best_mix
from meseta.planner.search.problem import PlacementProblem

NUM_SINGLE_PATHS = 2
"""Paths that are tried by themselves, beside the best mix."""
_NUM_BISECTIONS = 40
"""Halvings of an interval: more than a float can tell apart."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What every plan takes at least."""

    step_s: float
    """Seconds of a step."""
    reason: str
    """What it follows from."""

    def relative_gap(self, step_s: float) -> float:
        """How far above the bound a plan of `step_s` is, as a part of the bound."""
        return step_s / self.step_s - 1.0 if self.step_s > 0.0 else 0.0


def lower_bound(problem: PlacementProblem) -> LowerBound:
    """No step is shorter than what the average rank has to do, nor than the longest piece that is not cut further.

    Both are asked at once: with pieces no longer than T, tables cannot be cheaper than their cheapest options that keep
    to T, and where that makes the average rank busier than T, no step takes T. The room of all devices together is kept
    to through a price of bytes, of which any is valid (the dual of J. Lagrange; M. L. Fisher, Management Science 27,
    1981). Beside that, of num_ranks + 1 tables two share a rank. Every piece is taken to have a cache for itself, and
    to be cut into any number of parts between those that the search knows.

    Where something is hidden, a step is as long as the longest of its paths, and so no shorter than any mix of them
    whose weights add up to 1. In such a mix each component has a weight of at most 1, and a path meets the slowest rank
    of each: the average rank, and the rank of any piece, take no more. So all of the above holds with seconds that are
    weighed so, and the bound is the highest of a few mixes. Where ranks differ so much in what they pack that nothing
    is gained, a step takes the sum of all components, which is not below the weighed one either.
    """
    if not problem.options.num_units:
        return LowerBound(step_s=problem.fixed_s, reason="the dense part and latencies")
    bounds = [_bound_for_mix(problem, mix) for mix in _candidate_mixes(problem)]
    return max(bounds, key=lambda bound: bound.step_s)


def _candidate_mixes(problem: PlacementProblem) -> list[Floats | None]:
    """Weights of paths [P] that are tried: those under which the average rank takes most, and the paths alone that say
    most about it; None where there are no paths."""
    options, paths = problem.options, problem.options.paths
    if paths is None:
        return [None]
    least = options.common_seconds.copy()
    np.add.at(least, options.option_of_shard, problem.min_s[:, 0] / problem.cluster.num_ranks)
    starts = np.searchsorted(options.unit_index, np.arange(options.num_units))
    values = least @ paths.coefs.T
    alone = np.minimum.reduceat(values, starts).sum(axis=0) + paths.fixed_s
    alone[paths.required_costs.any(axis=1)] = -np.inf
    return [best_mix(paths, values, starts), *np.eye(len(alone))[np.argsort(-alone, kind="stable")[:NUM_SINGLE_PATHS]]]


def _bound_for_mix(problem: PlacementProblem, mix: Floats | None) -> LowerBound:
    """That of one mix of paths [P]; None: of the sum of all components."""
    paths, fixed_s = problem.options.paths, problem.fixed_s
    if paths is not None and mix is not None:
        fixed_s += float(mix @ paths.fixed_s)
    least = _OptionLowerBounds(problem, None if paths is None or mix is None else mix @ paths.coefs)
    low = least.average_s(np.ones(len(least.unit_index), np.bool_))
    reason = "what the average rank has to do"
    high = max(2.0 * low, float(least.longest_rank_s.max()))
    first = low
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if least.allows(middle) else (middle, high)
    if low > first * (1.0 + 1e-6):
        reason = (
            f"pieces of table {least.most_constrained_table(low)!r} are no shorter, unless they cost all ranks more"
        )
    return LowerBound(step_s=fixed_s + low, reason=reason)


class _OptionLowerBounds:
    """What every option takes at least."""

    def __init__(self, problem: PlacementProblem, weights: Floats | None = None) -> None:
        """`weights` [K] are those of components; None: 1 each."""
        options, costs = problem.options, OptionCosts(problem)
        self._problem, self._costs = problem, costs
        self.unit_index, self._starts = (
            options.unit_index,
            np.searchsorted(options.unit_index, np.arange(options.num_units)),
        )
        if weights is None:
            common, least_s = options.common_seconds.sum(axis=1), problem.min_s.sum(axis=2)
        else:
            common, least_s = options.common_seconds @ weights, problem.min_s @ weights
        self._average_s = (
            common
            + np.bincount(options.option_of_shard, least_s[:, 0], len(options.unit_index)) / problem.cluster.num_ranks
        )
        own = np.zeros(len(options.unit_index))
        np.maximum.at(own, options.option_of_shard, least_s[:, 1])
        self._longest_shard_s = self._min_over_finer(own)
        cheapest = self._min_by_unit(common)
        self.longest_rank_s = self._longest_shard_s + common + (cheapest.sum() - cheapest[self.unit_index])
        """[W]: seconds of the rank with an option's longest piece, whatever else it holds."""

    def _min_by_unit(self, values: Floats) -> Floats:
        found: Floats = np.minimum.reduceat(values, self._starts)
        return found

    def _min_over_finer(self, own: Floats) -> Floats:
        """[W]: the longest piece of the next finer option of the same scheme, for all numbers of parts between the
        two."""
        problem, finer = self._problem, own.copy()
        families: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for option, scheme in enumerate(problem.schemes):
            if scheme is not None:
                key = (int(self.unit_index[option]), scheme.sharding_type, scheme.tier, scheme.hot_rows)
                families.setdefault(key, []).append((scheme.row_parts * scheme.column_parts, option))
        for members in families.values():
            members.sort()
            for (_, option), (_, following) in pairwise(members):
                finer[option] = min(own[option], own[following])
            parts, last = members[-1]
            if 1 < parts < min(problem.cluster.num_ranks, self._max_parts(last)):
                finer[last] = 0.0
        return finer

    def _max_parts(self, option: int) -> int:
        """Parts beyond which a scheme cannot cut the table of an option."""
        scheme, tables = self._problem.schemes[option], self._problem.workload.tables
        spec = tables[self._problem.units[int(self.unit_index[option])][0]]
        by_columns = scheme is not None and scheme.column_parts > 1
        return -(-spec.embedding_dim // 16) if by_columns else spec.num_embeddings

    def average_s(self, allowed: Mask) -> float:
        """Seconds of the average rank, in the cheapest of the allowed options that keep to the room of all devices."""
        room, num_bytes = self._costs.capacity[0], self._costs.num_bytes[:, 0]
        values = np.where(allowed, self._average_s, np.inf)

        def dual(price: float) -> float:
            return float(self._min_by_unit(values + price * num_bytes).sum() - price * (room if price else 0.0))

        best = dual(0.0)
        if not np.isfinite(room) or not np.isfinite(best):
            return best
        low, high = 0.0, 10.0 * best / max(room, 1.0)
        for _ in range(_NUM_BISECTIONS // 2):
            one, other = low + (high - low) / 3, high - (high - low) / 3
            left, right = dual(one), dual(other)
            best = max(best, left, right)
            low, high = (one, high) if left < right else (low, other)
        return best

    def allows(self, limit_s: float) -> bool:
        """Whether the bounds let a step take `limit_s` beside what is fixed."""
        allowed = self.longest_rank_s <= limit_s
        if not self._covers_all_units(allowed):
            return False
        own = np.sort(self._min_by_unit(np.where(allowed, self._longest_shard_s, np.inf)))[::-1]
        ranks = self._problem.cluster.num_ranks
        if len(own) > ranks and own[ranks - 1] + own[ranks] > limit_s:
            return False
        return self.average_s(allowed) <= limit_s

    def _covers_all_units(self, allowed: Mask) -> bool:
        return len(np.unique(self.unit_index[allowed])) == len(self._starts)

    def most_constrained_table(self, limit_s: float) -> str:
        """The table whose options are dearer by most where pieces keep to `limit_s`."""
        free = self._min_by_unit(self._average_s)
        kept = self._min_by_unit(np.where(self.longest_rank_s <= limit_s, self._average_s, np.inf))
        unit = int((kept - free).argmax())
        return self._problem.workload.tables[self._problem.units[unit][0]].name
