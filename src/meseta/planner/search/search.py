"""The search for a plan: several constructions, a beam over finer cuts, local improvement; the best of all is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.search.assignment import AddedCost, Assignment, BusySeconds, Ints
from meseta.planner.search.improve import MIN_GAIN_SHARE, improve_locally, perturb_and_reinsert
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.partition import place_by_differencing, place_greedily
from meseta.planner.search.problem import PlacementProblem

EXCHANGE_LIMIT_FACTORS = (1.0, 1.1, 1.3, float("inf"))
"""Limits of the greedy grid, as multiples of what a rank exchanges on average."""
MAX_BEAM_LEVELS = 6
BEAM_WORK = 10_000
"""Units times assignments that the beam may place."""
OPTIMALITY_GAP_RATIO = 1e-5
"""A greedy placement of many units that costs so little more than any could is not made in other ways too."""
MAX_UNITS_WIDE_SEARCH = 40
MAX_UNITS_UNPRUNED = 300
"""Of more, nothing is placed in ways that cannot cost less than the best so far."""
PERTURB_WORK = 3_000
"""Units times rounds of taking some away and placing them anew."""
MAX_PERTURBATIONS = 150
MAX_ROUNDS = 3_000
MIN_ROUNDS = 500
IMPROVE_WORK = 600_000
"""Units times changes of one assignment."""


@dataclass(frozen=True)
class SearchBreadth:
    """How many assignments are followed; few units take so little time that many are."""

    num_survivors: int
    """Assignments that go on from the constructions."""
    beam_width: int
    """Assignments that go on from level to level of the beam."""
    num_refined_units: int
    """Units of the busiest ranks that are cut finer on each level."""
    num_improved: int
    """Assignments that are improved."""

    @staticmethod
    def from_num_units(num_units: int) -> SearchBreadth:
        """For a problem of so many units."""
        if num_units <= MAX_UNITS_WIDE_SEARCH:
            return SearchBreadth(num_survivors=12, beam_width=6, num_refined_units=8, num_improved=12)
        return SearchBreadth(
            num_survivors=6, beam_width=3, num_refined_units=4, num_improved=2 if num_units <= MAX_UNITS_UNPRUNED else 1
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A complete assignment that keeps to all limits."""

    assignment: Assignment
    origin: str
    """Which part of the search it comes from."""

    @property
    def sort_key(self) -> tuple[float, float]:
        return self.assignment.cost, self.assignment.tie_breaker


def search_assignments(problem: PlacementProblem) -> list[Candidate]:
    """The best assignments of a problem, cheapest first; none where no construction fits.

    Options are chosen by the length of their longest piece (`OptionCosts.choices`) and placed greedily. The best
    choices are placed by Karmarkar and Karp's differencing and in a greedy grid over exchange limits too; a beam cuts
    the tables of the busiest ranks finer, by rows and by columns, in the way of NeuroShard (D. Zha et al., arXiv
    2305.01868, section 3.4). What comes first then is improved locally. Deterministic: the work is bounded by counts,
    not by time.
    """
    options, machine = problem.options, problem.cluster
    if not options.num_units:
        return [Candidate(assignment=Assignment(options, machine, np.zeros(0, np.int64)), origin="nothing to place")]
    breadth, found = SearchBreadth.from_num_units(options.num_units), list[Candidate]()
    for choice in OptionCosts(problem).choices():
        assignment = place_greedily(options, machine, choice, AddedCost())
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="greedy"))
    found = _select_best(found, breadth.num_survivors)
    for start in [
        one
        for one in found
        if _can_cost_less(problem, one.assignment.option, one.assignment.cost / (1 + OPTIMALITY_GAP_RATIO))
    ]:
        assignment = place_by_differencing(options, machine, start.assignment.option)
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="differencing"))
        found += _greedy_grid(problem, start.assignment.option)
    found = _select_best(found, breadth.num_survivors)
    if not found:
        return []
    found = _select_best(found + _beam_search(problem, found[: breadth.beam_width], breadth), breadth.num_survivors)
    changes = min(max(IMPROVE_WORK // max(options.num_units, 1), MIN_ROUNDS), MAX_ROUNDS)
    better = [
        Candidate(assignment=improve_locally(start.assignment.copy(), changes), origin=f"{start.origin}, improved")
        for start in found[: breadth.num_improved]
    ]
    rounds = min(PERTURB_WORK // max(options.num_units, 1), MAX_PERTURBATIONS)
    best = _select_best(better, 1)[0]
    better.append(Candidate(assignment=perturb_and_reinsert(best.assignment.copy(), rounds), origin=best.origin))
    return _select_best(found + better, breadth.num_survivors)


def _select_best(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The cheapest, first; no two that cost the same to the last bit."""
    ordered = sorted(found, key=lambda one: one.sort_key)
    distinct = [one for i, one in enumerate(ordered) if not i or one.sort_key != ordered[i - 1].sort_key]
    return distinct[:count]


def _greedy_grid(problem: PlacementProblem, choice: Ints) -> list[Candidate]:
    """Greedy placements that bound what a rank exchanges by each of a few limits."""
    options, num_ranks = problem.options, problem.cluster.num_ranks
    exchanged = (
        sum(options.exchange_seconds(options.seconds[options.shard_slice(int(one))]).sum() for one in choice)
        / num_ranks
    )
    found = []
    for factor in EXCHANGE_LIMIT_FACTORS if num_ranks > 1 else ():
        limit_s = factor * exchanged if np.isfinite(factor) else np.inf
        assignment = place_greedily(options, problem.cluster, choice, BusySeconds(limit_s))
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="greedy grid"))
    return found


def _can_cost_less(problem: PlacementProblem, choice: Ints, cost: float) -> bool:
    """Whether a placement of a choice could: each component takes at least the average rank's or the longest piece's.

    Few units are placed in any case, which takes little: improved, what cost more at first may come out ahead.
    """
    options = problem.options
    if options.num_units <= MAX_UNITS_UNPRUNED:
        return True
    busy = np.maximum(
        options.total_seconds[choice].sum(axis=0) / problem.cluster.num_ranks, options.max_seconds[choice].max(axis=0)
    )
    common, is_used = options.common_seconds[choice].sum(axis=0), options.optional_costs[choice].max(axis=0) > 0
    return bool(options.step_s(busy, common, is_used) < cost)


def _beam_search(problem: PlacementProblem, states: Sequence[Candidate], breadth: SearchBreadth) -> list[Candidate]:
    """Level by level the tables that end last are cut finer; the best few of all children go on."""
    found: list[Candidate] = []
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
        found += children
        if not children or states[0].assignment.cost >= least:
            break
    return [Candidate(assignment=one.assignment, origin="beam") for one in _select_best(found, breadth.beam_width)]


def _finer_choices(problem: PlacementProblem, assignment: Assignment, num_units: int) -> list[Ints]:
    """Choices in which one of so many units of the busiest ranks has the next larger number of row or column ranges."""
    options, found = problem.options, []
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
                    found.append(choice)
                    break
    return found
