"""Local improvement of an assignment: other options, moves and swaps for what the busiest ranks hold."""

from __future__ import annotations

import numpy as np

from meseta.planner.search.assignment import AddedCost, Assignment, Floats, Ints

MAX_CANDIDATES = 24
"""Units of the busiest ranks that are tried in one round."""
MAX_SWAPPED = 8
"""Single pieces of a busiest rank that are offered for exchange in one round."""
MAX_IN_VAIN = 30
"""Rounds without gain after which shaking ends."""
TOLERANCE = 1e-9
"""A change must gain more than this share of the cost, so that rounding does not go round in circles."""


def improve(assignment: Assignment, max_rounds: int) -> Assignment:
    """Change the assignment as long as that lowers its cost, or evens out what is equally busy; returns it.

    In each round the units on the ranks that end a component last are tried in all their options on the best ranks for
    them; where none of that helps, they are exchanged with single pieces of other ranks.
    """
    for _ in range(max_rounds):
        if not (_move_one(assignment) or _swap_one(assignment)):
            break
    return assignment


def perturb_and_reinsert(assignment: Assignment, max_rounds: int, seed: int = 0) -> Assignment:
    """Take a few units away and place them anew, in each round others, and keep what is better.

    Source: P. Shaw, "Using constraint programming and local search methods to solve vehicle routing problems" (1998),
    as large neighbourhood search. The same seed gives the same assignment.
    """
    random = np.random.default_rng(seed)
    best, num_units, in_vain = assignment, assignment.options.num_units, 0
    for _ in range(max_rounds if num_units > 1 else 0):
        in_vain += 1
        if in_vain > MAX_IN_VAIN:
            break
        trial = best.copy()
        busy = trial.busiest_units()
        size = min(int(random.integers(2, 6)), num_units)
        taken = list(dict.fromkeys([busy[int(random.integers(len(busy)))], *random.permutation(num_units)[:size]]))
        before = [trial.remove(int(unit)) for unit in taken]
        random.shuffle(taken)
        if all(_add_best(trial, int(unit)) for unit in taken):
            trial = improve(trial, 4 * len(before))
            if _is_better(trial.cost, trial.spread, best):
                best, in_vain = trial, 0
    return best


def _add_best(assignment: Assignment, unit: int) -> bool:
    """Place a unit in the option that costs least now; False where none has room."""
    found = best_place(assignment, unit, np.inf)
    if found is None:
        return False
    assignment.add(found[2], found[3])
    return True


def _is_better(cost: float, spread: float, than: Assignment) -> bool:
    now = than.cost
    if cost < now * (1 - TOLERANCE):
        return True
    return cost <= now * (1 + TOLERANCE / 10) and spread < than.spread * (1 - TOLERANCE)


def best_place(
    assignment: Assignment, unit: int, ceiling: float, *, without: int = -1
) -> tuple[float, float, int, Ints] | None:
    """(cost, spread, option, ranks) of the best place for a unit that is not placed, of those that may cost no more
    than `ceiling`, in any option but `without`; None where there is none."""
    options, score, best = assignment.options, AddedCost(), None
    span = options.of_unit(unit)
    least = _least_costs(assignment, unit, slice(span.start, span.stop))
    for index in np.argsort(least, kind="stable"):
        if least[index] > (ceiling if best is None else best[0]):
            break
        option = span[int(index)]
        ranks = assignment.find(option, score) if option != without else None
        if ranks is not None:
            assignment.add(option, ranks)
            result = (assignment.cost, assignment.spread, option, ranks)
            assignment.remove(unit)
            if best is None or result[:2] < best[:2]:
                best = result
    return best


def _least_costs(assignment: Assignment, unit: int, span: slice) -> Floats:
    """[w]: costs below which no place for a unit in each of its options can go: every piece on the least busy rank."""
    options, counted = assignment.options, int(assignment.counted[unit])
    load = assignment.load
    busy = np.maximum(load.max(axis=1), load.min(axis=1) + options.longest[span])
    common = assignment.common - options.common_seconds[counted] + options.common_seconds[span]
    uses = assignment.uses - options.uses[counted] + options.uses[span]
    return options.step_s(busy, common, uses > 0)


def _move_one(assignment: Assignment) -> bool:
    """Give the first unit of the busiest ranks that gains by it its best other place; False where none does."""
    ceiling = assignment.cost * (1 + TOLERANCE)
    for unit in assignment.busiest_units()[:MAX_CANDIDATES]:
        option, ranks = assignment.remove(unit)
        found = best_place(assignment, unit, ceiling)
        assignment.add(option, ranks)
        if found and _is_better(*found[:2], assignment):
            assignment.remove(unit)
            assignment.add(found[2], found[3])
            return True
    return False


def _swap_one(assignment: Assignment) -> bool:
    """Exchange a single piece of a busiest rank with one of another rank; False where that helps nothing."""
    options = assignment.options
    single = [
        u
        for u in range(options.num_units)
        if len(assignment.ranks[u]) == 1 and u not in options.apart and int(assignment.option[u]) not in options.fixed
    ]
    if not single:
        return False
    units = np.array(single)
    ranks = np.array([assignment.ranks[unit][0] for unit in single])
    pieces = options.first[assignment.option[units]]
    best = None
    now = float(assignment.cost_of(assignment.load.max(axis=1)))
    for rank in assignment.busiest_ranks():
        mine = np.flatnonzero(ranks == rank)
        for one in mine[np.argsort(-options.piece_s[pieces[mine]], kind="stable")][:MAX_SWAPPED]:
            costs = _swapped_costs(assignment, int(rank), ranks, pieces, int(one))
            if costs.min() >= (now * (1 - TOLERANCE) if best is None else best[0]):
                continue
            costs[(ranks == rank) | ~_may_swap(assignment, units, ranks, pieces, int(one))] = np.inf
            other = int(costs.argmin())
            if costs[other] < (now * (1 - TOLERANCE) if best is None else best[0]):
                best = float(costs[other]), int(units[one]), int(units[other])
    if best is None:
        return False
    _, one, other = best
    (option, mine), (other_way, theirs) = assignment.remove(one), assignment.remove(other)
    assignment.add(option, theirs)
    assignment.add(other_way, mine)
    return True


def _swapped_costs(assignment: Assignment, rank: int, ranks: Ints, pieces: Ints, one: int) -> Floats:
    """[n]: the cost of the assignment, as `Assignment.cost_of` gives it, when piece `one` of `rank` changes places with
    each piece."""
    seconds = assignment.options.seconds
    change = seconds[pieces] - seconds[pieces[one]]  # [n, K]
    load = assignment.load
    others = load.copy()
    others[:, rank] = -np.inf
    top = others.argmax(axis=1)
    first = others.max(axis=1)
    others[np.arange(len(top)), top] = -np.inf
    second = others.max(axis=1)
    rest = np.where(ranks[:, None] == top[None, :], second[None, :], first[None, :])
    return assignment.cost_of(np.maximum(rest, np.maximum(load[:, rank] + change, load[:, ranks].T - change)))


def _may_swap(assignment: Assignment, units: Ints, ranks: Ints, pieces: Ints, one: int) -> np.ndarray:
    """[n]: whether memory and pins let piece `one` change places with each of the pieces."""
    options, machine = assignment.options, assignment.machine
    need = options.rank_need[pieces] - options.rank_need[pieces[one]]
    rank = ranks[one]
    fits = (assignment.rank_used[rank] + need <= machine.rank_room[rank]).all(axis=1)
    fits &= (assignment.rank_used[ranks] - need <= machine.rank_room[ranks]).all(axis=1)
    fits &= (options.host_need[pieces] == options.host_need[pieces[one]]).all(axis=1) | (
        ranks // machine.devices_per_host == rank // machine.devices_per_host
    )
    for unit, mask in options.allowed.items():
        fits[units == unit] &= mask[rank]
        if unit == units[one]:
            fits &= mask[ranks]
    return fits
