"""The search for a plan: several constructions, a beam over finer cuts, local improvement; the best of all is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.search.assignment import AddedCost, Assignment, BusySeconds, Ints
from meseta.planner.search.improve import TOLERANCE, improve, perturb_and_reinsert
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.partition import place_by_differencing, place_greedily
from meseta.planner.search.problem import Problem

EXCHANGE_LIMITS = (1.0, 1.1, 1.3, float("inf"))
"""Limits of the greedy grid, as multiples of what a rank exchanges on average."""
MAX_LEVELS = 6
BEAM_WORK = 10_000
"""Units times assignments that the beam may place."""
CLOSE = 1e-5
"""A greedy placement of many units that costs so little more than any could is not made in other ways too."""
FEW_UNITS = 40
MANY_UNITS = 300
"""Of more, nothing is placed in ways that cannot cost less than the best so far."""
PERTURB_WORK = 3_000
"""Units times rounds of taking some away and placing them anew."""
MAX_PERTURBATIONS = 150
MAX_ROUNDS = 3_000
MIN_ROUNDS = 500
IMPROVE_WORK = 600_000
"""Units times changes of one assignment."""


@dataclass(frozen=True)
class Breadth:
    """How many assignments are followed; few units take so little time that many are."""

    best: int
    """Assignments that go on from the constructions."""
    beam: int
    """Assignments that go on from level to level of the beam."""
    cut: int
    """Units of the busiest ranks that are cut finer on each level."""
    improved: int
    """Assignments that are improved."""

    @staticmethod
    def of(num_units: int) -> Breadth:
        """For a problem of so many units."""
        if num_units <= FEW_UNITS:
            return Breadth(best=12, beam=6, cut=8, improved=12)
        return Breadth(best=6, beam=3, cut=4, improved=2 if num_units <= MANY_UNITS else 1)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A complete assignment that keeps to all limits."""

    assignment: Assignment
    origin: str
    """Which part of the search it comes from."""

    @property
    def key(self) -> tuple[float, float]:
        return self.assignment.cost, self.assignment.spread


def search(problem: Problem) -> list[Candidate]:
    """The best assignments of a problem, cheapest first; none where no construction fits.

    Options are chosen by the length of their longest piece (`OptionCosts.choices`) and placed greedily. The best
    choices are placed by Karmarkar and Karp's differencing and in a greedy grid over exchange limits too; a beam cuts
    the tables of the busiest ranks finer, by rows and by columns, in the way of NeuroShard (D. Zha et al., arXiv
    2305.01868, section 3.4). What comes first then is improved locally. Deterministic: the work is bounded by counts,
    not by time.
    """
    options, machine = problem.options, problem.machine
    if not options.num_units:
        return [Candidate(assignment=Assignment(options, machine, np.zeros(0, np.int64)), origin="nothing to place")]
    breadth, found = Breadth.of(options.num_units), list[Candidate]()
    for choice in OptionCosts(problem).choices():
        assignment = place_greedily(options, machine, choice, AddedCost())
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="greedy"))
    found = _best(found, breadth.best)
    for start in [
        one for one in found if _may_cost_less(problem, one.assignment.option, one.assignment.cost / (1 + CLOSE))
    ]:
        assignment = place_by_differencing(options, machine, start.assignment.option)
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="differencing"))
        found += _grid(problem, start.assignment.option)
    found = _best(found, breadth.best)
    if not found:
        return []
    found = _best(found + _beam(problem, found[: breadth.beam], breadth), breadth.best)
    changes = min(max(IMPROVE_WORK // max(options.num_units, 1), MIN_ROUNDS), MAX_ROUNDS)
    better = [
        Candidate(assignment=improve(start.assignment.copy(), changes), origin=f"{start.origin}, improved")
        for start in found[: breadth.improved]
    ]
    rounds = min(PERTURB_WORK // max(options.num_units, 1), MAX_PERTURBATIONS)
    best = _best(better, 1)[0]
    better.append(Candidate(assignment=perturb_and_reinsert(best.assignment.copy(), rounds), origin=best.origin))
    return _best(found + better, breadth.best)


def _best(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The cheapest, first; no two that cost the same to the last bit."""
    ordered = sorted(found, key=lambda one: one.key)
    distinct = [one for i, one in enumerate(ordered) if not i or one.key != ordered[i - 1].key]
    return distinct[:count]


def _grid(problem: Problem, choice: Ints) -> list[Candidate]:
    """Greedy placements that bound what a rank exchanges by each of a few limits."""
    options, num_ranks = problem.options, problem.machine.num_ranks
    exchanged = sum(options.exchanged(options.seconds[options.pieces(int(one))]).sum() for one in choice) / num_ranks
    found = []
    for factor in EXCHANGE_LIMITS if num_ranks > 1 else ():
        limit_s = factor * exchanged if np.isfinite(factor) else np.inf
        assignment = place_greedily(options, problem.machine, choice, BusySeconds(limit_s))
        if assignment is not None:
            found.append(Candidate(assignment=assignment, origin="greedy grid"))
    return found


def _may_cost_less(problem: Problem, choice: Ints, cost: float) -> bool:
    """Whether a placement of a choice could: each component takes at least the average rank's or the longest piece's.

    Few units are placed in any case, which takes little: improved, what cost more at first may come out ahead.
    """
    options = problem.options
    if options.num_units <= MANY_UNITS:
        return True
    busy = np.maximum(
        options.total[choice].sum(axis=0) / problem.machine.num_ranks, options.longest[choice].max(axis=0)
    )
    common, is_used = options.common_seconds[choice].sum(axis=0), options.uses[choice].max(axis=0) > 0
    return bool(options.step_s(busy, common, is_used) < cost)


def _beam(problem: Problem, states: Sequence[Candidate], breadth: Breadth) -> list[Candidate]:
    """Level by level the tables that end last are cut finer; the best few of all children go on."""
    found: list[Candidate] = []
    seen = {state.assignment.option.tobytes() for state in states}
    budget = BEAM_WORK // max(problem.options.num_units, 1)
    for _ in range(MAX_LEVELS):
        children: list[Candidate] = []
        least = min(state.assignment.cost for state in states)
        for choice in [choice for state in states for choice in _finer(problem, state.assignment, breadth.cut)]:
            if budget and choice.tobytes() not in seen:
                seen.add(choice.tobytes())
                if not _may_cost_less(problem, choice, (1 - TOLERANCE) * least):
                    continue
                budget -= 1
                assignment = place_greedily(problem.options, problem.machine, choice, AddedCost())
                placed = [] if assignment is None else [Candidate(assignment=assignment, origin="beam")]
                children += _best(placed + _grid(problem, choice), 1)
        states = _best([*states, *children], breadth.beam)
        found += children
        if not children or states[0].assignment.cost >= least:
            break
    return [Candidate(assignment=one.assignment, origin="beam") for one in _best(found, breadth.beam)]


def _finer(problem: Problem, assignment: Assignment, num_units: int) -> list[Ints]:
    """Choices in which one of so many units of the busiest ranks has the next larger number of row or column ranges."""
    options, found = problem.options, []
    for unit in assignment.busiest_units()[:num_units]:
        option = int(assignment.option[unit])
        scheme = problem.schemes[option]
        if scheme is None:
            continue
        parts = scheme.row_parts * scheme.column_parts
        for by_rows in (True, False):
            for other in options.of_unit(unit):
                finer = problem.schemes[other]
                if finer is None or finer.tier != scheme.tier or finer.row_parts * finer.column_parts <= parts:
                    continue
                if (finer.row_parts > 1) is by_rows and not (options.everywhere[other] or finer.is_blocked):
                    choice = assignment.option.copy()
                    choice[unit] = other
                    found.append(choice)
                    break
    return found
