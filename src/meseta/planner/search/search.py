"""Result of planning: a plan with its prediction and search problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.search.assignment import AddedCost, Assignment, BusySeconds, Ints
from meseta.planner.search.bound import LowerBound, lower_bound
from meseta.planner.search.improve import MIN_GAIN_SHARE, improve_locally, perturb_and_reinsert
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.partition import place_by_differencing, place_greedily
from meseta.planner.search.problem import PlacementProblem
from meseta.spec import Plan


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Plan with its prediction and search problem."""

    plan: Plan
    prediction: Prediction
    problem: PlacementProblem
    assignment: Assignment
    """Assignment of the search that the plan was made from."""
    origin: str
    """Part of the search that found the plan."""

    @cached_property
    def bound(self) -> LowerBound:
        """Lower bound of all plans with the same sharding schemes."""
        return lower_bound(self.problem)

    @cached_property
    def constants_step_s(self) -> float:
        """Seconds per step predicted by the constants alone. The lower bound applies to them, and not to predictions of
        networks."""
        if self.problem.cost_model.neural is None:
            return self.prediction.step_s
        problem, constants = self.problem, replace(self.problem.cost_model, neural=None)
        prediction = predict(
            self.plan, problem.workload, problem.topology, constants, loads=problem.loads, run=problem.run
        )
        return prediction.step_s


EXCHANGE_LIMIT_FACTORS = (1.0, 1.1, 1.3, float("inf"))
"""Limits of the greedy grid, relative to the average exchange time of a rank."""
MAX_BEAM_LEVELS = 6
BEAM_WORK = 10_000
"""Maximum number of units that the beam search places, summed over assignments."""
OPTIMALITY_GAP_RATIO = 1e-5
"""Gap to a lower bound below which a greedy placement of many units needs no other constructions."""
MAX_UNITS_WIDE_SEARCH = 40
MAX_UNITS_UNPRUNED = 300
"""Above this number of units, skip constructions whose lower bound exceeds the best cost found so far."""
PERTURB_WORK = 3_000
"""Maximum number of perturbations, multiplied by the number of units."""
MAX_PERTURBATIONS = 150
MAX_ROUNDS = 3_000
MIN_ROUNDS = 500
IMPROVE_WORK = 600_000
"""Maximum number of changes of one assignment, multiplied by the number of units."""


@dataclass(frozen=True)
class SearchBreadth:
    """Numbers of assignments that the search follows. Small problems follow more."""

    num_survivors: int
    """Number of assignments that are kept after the constructions."""
    beam_width: int
    """Number of assignments that are kept after each level of the beam search."""
    num_refined_units: int
    """Number of units of the busiest ranks that each level of the beam search splits into more shards."""
    num_improved: int  # assignments that are improved locally

    @staticmethod
    def from_num_units(num_units: int) -> SearchBreadth:
        if num_units <= MAX_UNITS_WIDE_SEARCH:
            return SearchBreadth(num_survivors=12, beam_width=6, num_refined_units=8, num_improved=12)
        return SearchBreadth(
            num_survivors=6, beam_width=3, num_refined_units=4, num_improved=2 if num_units <= MAX_UNITS_UNPRUNED else 1
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Complete assignment within all limits."""

    assignment: Assignment
    origin: str  # part of the search that found the assignment

    @property
    def sort_key(self) -> tuple[float, float]:
        return self.assignment.cost, self.assignment.tie_breaker


def search_assignments(problem: PlacementProblem) -> list[Candidate]:
    """Return the best assignments of a problem in ascending order of cost, or an empty list if none fits."""
    options, machine = problem.options, problem.cluster
    if not options.num_units:
        return [Candidate(assignment=Assignment(options, machine, np.zeros(0, np.int64)), origin="nothing to place")]
    # The result is deterministic, because counts and not times limit the work.
    breadth, candidates = SearchBreadth.from_num_units(options.num_units), list[Candidate]()
    # Choices differ by the length of their longest shard. The best ones are also placed by differencing and by a greedy
    # grid over exchange limits. The beam search follows NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.4).
    for choice in OptionCosts(problem).choices():
        assignment = place_greedily(options, machine, choice, AddedCost())
        if assignment is not None:
            candidates.append(Candidate(assignment=assignment, origin="greedy"))
    candidates = _select_best(candidates, breadth.num_survivors)
    for start in [
        one
        for one in candidates
        if _can_cost_less(problem, one.assignment.option, one.assignment.cost / (1 + OPTIMALITY_GAP_RATIO))
    ]:
        assignment = place_by_differencing(options, machine, start.assignment.option)
        if assignment is not None:
            candidates.append(Candidate(assignment=assignment, origin="differencing"))
        candidates += _greedy_grid(problem, start.assignment.option)
    candidates = _select_best(candidates, breadth.num_survivors)
    if not candidates:
        return []
    candidates = _select_best(
        candidates + _beam_search(problem, candidates[: breadth.beam_width], breadth), breadth.num_survivors
    )
    changes = min(max(IMPROVE_WORK // max(options.num_units, 1), MIN_ROUNDS), MAX_ROUNDS)
    better = [
        Candidate(assignment=improve_locally(start.assignment.copy(), changes), origin=f"{start.origin}, improved")
        for start in candidates[: breadth.num_improved]
    ]
    rounds = min(PERTURB_WORK // max(options.num_units, 1), MAX_PERTURBATIONS)
    best = _select_best(better, 1)[0]
    better.append(Candidate(assignment=perturb_and_reinsert(best.assignment.copy(), rounds), origin=best.origin))
    return _select_best(candidates + better, breadth.num_survivors)


def _select_best(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the cheapest candidates in ascending order. Of candidates with equal cost, only one is kept."""
    ordered = sorted(candidates, key=lambda one: one.sort_key)
    distinct = [one for i, one in enumerate(ordered) if not i or one.sort_key != ordered[i - 1].sort_key]
    return distinct[:count]


def _greedy_grid(problem: PlacementProblem, choice: Ints) -> list[Candidate]:
    options, num_ranks = problem.options, problem.cluster.num_ranks
    exchanged = (
        sum(options.exchange_seconds(options.seconds[options.shard_slice(int(one))]).sum() for one in choice)
        / num_ranks
    )
    candidates = []
    for factor in EXCHANGE_LIMIT_FACTORS if num_ranks > 1 else ():
        limit_s = factor * exchanged if np.isfinite(factor) else np.inf
        assignment = place_greedily(options, problem.cluster, choice, BusySeconds(limit_s))
        if assignment is not None:
            candidates.append(Candidate(assignment=assignment, origin="greedy grid"))
    return candidates


def _can_cost_less(problem: PlacementProblem, choice: Ints, cost: float) -> bool:
    """Whether a placement of a choice may cost less than `cost`. Always true for small problems."""
    options = problem.options
    # Placements of few units take little time, and may become better than others after improvement.
    if options.num_units <= MAX_UNITS_UNPRUNED:
        return True
    busy = np.maximum(
        # Each component takes at least as long as on the average rank, and as its longest shard.
        options.total_seconds[choice].sum(axis=0) / problem.cluster.num_ranks,
        options.max_seconds[choice].max(axis=0),
    )
    common, is_used = options.common_seconds[choice].sum(axis=0), options.optional_costs[choice].max(axis=0) > 0
    return bool(options.step_s(busy, common, is_used) < cost)


def _beam_search(problem: PlacementProblem, states: Sequence[Candidate], breadth: SearchBreadth) -> list[Candidate]:
    """Split the tables of the busiest ranks into more shards, level by level, and keep the best assignments."""
    candidates: list[Candidate] = []
    seen = {state.assignment.option.tobytes() for state in states}
    budget = BEAM_WORK // max(problem.options.num_units, 1)
    for _ in range(MAX_BEAM_LEVELS):
        children: list[Candidate] = []
        least = min(state.assignment.cost for state in states)
        for choice in [
            choice
            for state in states
            for choice in _finer_choices(problem, state.assignment, breadth.num_refined_units)
        ]:
            if budget and choice.tobytes() not in seen:
                seen.add(choice.tobytes())
                if not _can_cost_less(problem, choice, (1 - MIN_GAIN_SHARE) * least):
                    continue
                budget -= 1
                assignment = place_greedily(problem.options, problem.cluster, choice, AddedCost())
                placed = [] if assignment is None else [Candidate(assignment=assignment, origin="beam")]
                children += _select_best(placed + _greedy_grid(problem, choice), 1)
        states = _select_best([*states, *children], breadth.beam_width)
        candidates += children
        if not children or states[0].assignment.cost >= least:
            break
    return [Candidate(assignment=one.assignment, origin="beam") for one in _select_best(candidates, breadth.beam_width)]


def _finer_choices(problem: PlacementProblem, assignment: Assignment, num_units: int) -> list[Ints]:
    """Return choices in which one of `num_units` units of the busiest ranks has the next larger number of row or column
    ranges."""
    options, choices = problem.options, []
    for unit in assignment.busiest_units()[:num_units]:
        option = int(assignment.option[unit])
        scheme = problem.schemes[option]
        if scheme is None:
            continue
        parts = scheme.row_parts * scheme.column_parts
        for by_rows in (True, False):
            for other in options.unit_options(unit):
                finer = problem.schemes[other]
                if finer is None or finer.tier != scheme.tier or finer.row_parts * finer.column_parts <= parts:
                    continue
                if (finer.row_parts > 1) is by_rows and not (options.is_replicated[other] or finer.is_within_host):
                    choice = assignment.option.copy()
                    choice[unit] = other
                    choices.append(choice)
                    break
    return choices
