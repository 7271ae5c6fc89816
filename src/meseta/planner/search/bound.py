"""Lower bound of the predicted step over all plans with the same sharding schemes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meseta.planner.search.assignment import Floats, Mask
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.partition import best_mix
from meseta.planner.search.problem import PlacementProblem

NUM_SINGLE_PATHS = 2
"""Number of single paths that are tried in addition to the best mix."""
# Reaches the precision of a float.
_NUM_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """Lower bound of the duration of a step."""

    step_s: float
    reason: str
    """Limiting resource or table, for reports."""

    def relative_gap(self, step_s: float) -> float:
        """Return the relative difference of a plan with `step_s` to the bound."""
        return step_s / self.step_s - 1.0 if self.step_s > 0.0 else 0.0


def lower_bound(problem: PlacementProblem) -> LowerBound:
    """Return a lower bound of the step over all plans with the same sharding types and tiers."""
    if not problem.options.num_units:
        return LowerBound(step_s=problem.fixed_s, reason="the dense part and latencies")
    # A step is at least as long as any weighted mean of its paths with weights that sum to 1. In such a mean, each
    # component has a weight of at most 1, and its slowest rank takes at least as long as the average rank. If overlap
    # gains nothing because packing differs between ranks, a step is the sum of all components, which is not below the
    # weighted sum.
    bounds = [_bound_for_mix(problem, mix) for mix in _candidate_mixes(problem)]
    return max(bounds, key=lambda bound: bound.step_s)


def _candidate_mixes(problem: PlacementProblem) -> list[Floats | None]:
    """Return the weights of paths [P] to try, or `[None]` without overlap."""
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
    """Return the lower bound for the path weights `mix` [P], or for the sum of all components if it is `None`."""
    paths, fixed_s = problem.options.paths, problem.fixed_s
    if paths is not None and mix is not None:
        fixed_s += float(mix @ paths.fixed_s)
    least = _OptionLowerBounds(problem, None if paths is None or mix is None else mix @ paths.coefs)
    low = least.average_s(np.ones(len(least.unit_index), np.bool_))
    reason = "the work of the average rank"
    # If no shard may be longer than T, tables need options that keep to T. If these make the average rank busier than
    # T, no step takes T. The bisection finds the smallest T that is not excluded.
    high = max(2.0 * low, float(least.longest_rank_s.max()))
    first = low
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if least.allows(middle) else (middle, high)
    if low > first * (1.0 + 1e-6):
        reason = (
            f"the longest shard of table {least.most_constrained_table(low)!r}, unless finer shards cost all ranks more"
        )
    return LowerBound(step_s=fixed_s + low, reason=reason)


class _OptionLowerBounds:
    def __init__(self, problem: PlacementProblem, weights: Floats | None = None) -> None:
        """Compute lower bounds per option with component weights [K]. `None` means weight 1."""
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
        longest_s = np.zeros(len(options.unit_index))
        np.maximum.at(longest_s, options.option_of_shard, least_s[:, 1])
        # Lower bounds of shards assume a separate hardware cache.
        self._longest_shard_s = self._min_over_finer(longest_s)
        cheapest = self._min_by_unit(common)
        self.longest_rank_s = self._longest_shard_s + common + (cheapest.sum() - cheapest[self.unit_index])
        """Minimum seconds of the rank with the longest shard of each option [W]."""

    def _min_by_unit(self, values: Floats) -> Floats:
        minima: Floats = np.minimum.reduceat(values, self._starts)
        return minima

    def _min_over_finer(self, longest_s: Floats) -> Floats:
        """Return the minimum over each option and the next finer option of its scheme [W]."""
        # The bound must also hold for numbers of parts between two options.
        problem, finer = self._problem, longest_s.copy()
        families: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for option, scheme in enumerate(problem.schemes):
            if scheme is not None:
                key = (int(self.unit_index[option]), scheme.sharding_type, scheme.tier, scheme.hot_rows)
                families.setdefault(key, []).append((scheme.row_parts * scheme.column_parts, option))
        for members in families.values():
            members.sort()
            for (_, option), (_, following) in pairwise(members):
                finer[option] = min(longest_s[option], longest_s[following])
            parts, last = members[-1]
            if 1 < parts < min(problem.cluster.num_ranks, self._max_parts(last)):
                finer[last] = 0.0
        return finer

    def _max_parts(self, option: int) -> int:
        # A scheme cannot have more parts than rows, or blocks of 16 columns.
        scheme, tables = self._problem.schemes[option], self._problem.workload.tables
        spec = tables[self._problem.units[int(self.unit_index[option])][0]]
        by_columns = scheme is not None and scheme.column_parts > 1
        return -(-spec.embedding_dim // 16) if by_columns else spec.num_embeddings

    def average_s(self, allowed: Mask) -> float:
        """Return the minimum seconds of the average rank with the allowed options within the memory of all devices."""
        room, num_bytes = self._costs.capacity[0], self._costs.num_bytes[:, 0]
        values = np.where(allowed, self._average_s, np.inf)

        # The memory of all devices is a constraint with a price per byte. Any price gives a valid bound (Lagrangian
        # dual; M. L. Fisher, Management Science 27, 1981).
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
        """Whether the bounds permit a step of `limit_s` seconds in addition to the fixed seconds."""
        allowed = self.longest_rank_s <= limit_s
        if len(np.unique(self.unit_index[allowed])) < len(self._starts):
            return False
        shard_s = np.sort(self._min_by_unit(np.where(allowed, self._longest_shard_s, np.inf)))[::-1]
        # Of num_ranks + 1 tables, two share a rank.
        ranks = self._problem.cluster.num_ranks
        if len(shard_s) > ranks and shard_s[ranks - 1] + shard_s[ranks] > limit_s:
            return False
        return self.average_s(allowed) <= limit_s

    def most_constrained_table(self, limit_s: float) -> str:
        """Return the table whose cost increases most if shards may take at most `limit_s` seconds."""
        free = self._min_by_unit(self._average_s)
        kept = self._min_by_unit(np.where(self.longest_rank_s <= limit_s, self._average_s, np.inf))
        unit = int((kept - free).argmax())
        return self._problem.workload.tables[self._problem.units[unit][0]].name
