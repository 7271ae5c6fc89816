"""Local improvement of an assignment: other options, moves and swaps for what the busiest ranks hold."""

from __future__ import annotations

import numpy as np

from meseta.planner.search.assignment import AddedCost, Assignment, Floats, Ints

MAX_CANDIDATES = 24
"""Units of the busiest ranks that are tried in one round."""
MAX_SWAPPED = 8
"""Single pieces of a busiest rank that are offered for exchange in one round."""
MAX_ROUNDS_WITHOUT_GAIN = 30
"""Rounds without gain after which shaking ends."""
MIN_GAIN_SHARE = 1e-9
"""A change must gain more than this share of the cost, so that rounding does not go round in circles."""


def improve_locally(assignment: Assignment, max_rounds: int) -> Assignment:
    """Change the assignment as long as that lowers its cost, or evens out what is equally busy; returns it.

    In each round the units on the ranks that end a component last are tried in all their options on the best ranks for
    them; where none of that helps, they are exchanged with single pieces of other ranks.
    """
    for _ in range(max_rounds):
        if not (_try_move(assignment) or _try_swap(assignment)):
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
        if in_vain > MAX_ROUNDS_WITHOUT_GAIN:
            break
        trial = best.copy()
        busy = trial.busiest_units()
        size = min(int(random.integers(2, 6)), num_units)
        taken = list(dict.fromkeys([busy[int(random.integers(len(busy)))], *random.permutation(num_units)[:size]]))
        before = [trial.remove(int(unit)) for unit in taken]
        random.shuffle(taken)
        if all(_place_best(trial, int(unit)) for unit in taken):
            trial = improve_locally(trial, 4 * len(before))
            if _is_better(trial.cost, trial.tie_breaker, best):
                best, in_vain = trial, 0
    return best


def _place_best(assignment: Assignment, unit: int) -> bool:
    """Place a unit in the option that costs least now; False where none has room."""
    found = best_placement(assignment, unit, np.inf)
    if found is None:
        return False
    assignment.place(found[2], found[3])
    return True


def _is_better(cost: float, spread: float, than: Assignment) -> bool:
    now = than.cost
    if cost < now * (1 - MIN_GAIN_SHARE):
        return True
    return cost <= now * (1 + MIN_GAIN_SHARE / 10) and spread < than.tie_breaker * (1 - MIN_GAIN_SHARE)


def best_placement(
    assignment: Assignment, unit: int, ceiling: float, *, excluded_option: int = -1
) -> tuple[float, float, int, Ints] | None:
    """(cost, spread, option, ranks) of the best place for a unit that is not placed, of those that may cost no more
    than `ceiling`, in any option but `excluded_option`; None where there is none."""
    options, score, best = assignment.options, AddedCost(), None
    span = options.unit_options(unit)
    least = _cost_lower_bounds(assignment, unit, slice(span.start, span.stop))
    for index in np.argsort(least, kind="stable"):
        if least[index] > (ceiling if best is None else best[0]):
            break
        option = span[int(index)]
        ranks = assignment.find_ranks(option, score) if option != excluded_option else None
        if ranks is not None:
            assignment.place(option, ranks)
            result = (assignment.cost, assignment.tie_breaker, option, ranks)
            assignment.remove(unit)
            if best is None or result[:2] < best[:2]:
                best = result
    return best


def _cost_lower_bounds(assignment: Assignment, unit: int, span: slice) -> Floats:
    """[w]: costs below which no place for a unit in each of its options can go: every piece on the least busy rank."""
    options, counted = assignment.options, int(assignment.counted_option[unit])
    load = assignment.load
    busy = np.maximum(load.max(axis=1), load.min(axis=1) + options.max_seconds[span])
    common = assignment.common_seconds - options.common_seconds[counted] + options.common_seconds[span]
    uses = assignment.optional_counts - options.optional_costs[counted] + options.optional_costs[span]
    return options.step_s(busy, common, uses > 0)


def _try_move(assignment: Assignment) -> bool:
    """Give the first unit of the busiest ranks that gains by it its best other place; False where none does."""
    ceiling = assignment.cost * (1 + MIN_GAIN_SHARE)
    for unit in assignment.busiest_units()[:MAX_CANDIDATES]:
        option, ranks = assignment.remove(unit)
        found = best_placement(assignment, unit, ceiling)
        assignment.place(option, ranks)
        if found and _is_better(*found[:2], assignment):
            assignment.remove(unit)
            assignment.place(found[2], found[3])
            return True
    return False


def _try_swap(assignment: Assignment) -> bool:
    """Exchange a single piece of a busiest rank with one of another rank; False where that helps nothing."""
    options = assignment.options
    single = [
        u
        for u in range(options.num_units)
        if len(assignment.ranks[u]) == 1
        and u not in options.conflicts
        and int(assignment.option[u]) not in options.fixed_ranks
    ]
    if not single:
        return False
    units = np.array(single)
    ranks = np.array([assignment.ranks[unit][0] for unit in single])
    pieces = options.first_shard[assignment.option[units]]
    best = None
    now = float(assignment.cost_with(assignment.load.max(axis=1)))
    for rank in assignment.busiest_ranks():
        mine = np.flatnonzero(ranks == rank)
        for one in mine[np.argsort(-options.shard_s[pieces[mine]], kind="stable")][:MAX_SWAPPED]:
            costs = _swap_costs(assignment, int(rank), ranks, pieces, int(one))
            if costs.min() >= (now * (1 - MIN_GAIN_SHARE) if best is None else best[0]):
                continue
            costs[(ranks == rank) | ~_can_swap(assignment, units, ranks, pieces, int(one))] = np.inf
            other = int(costs.argmin())
            if costs[other] < (now * (1 - MIN_GAIN_SHARE) if best is None else best[0]):
                best = float(costs[other]), int(units[one]), int(units[other])
    if best is None:
        return False
    _, one, other = best
    (option, mine), (other_way, theirs) = assignment.remove(one), assignment.remove(other)
    assignment.place(option, theirs)
    assignment.place(other_way, mine)
    return True


def _swap_costs(assignment: Assignment, rank: int, ranks: Ints, pieces: Ints, one: int) -> Floats:
    """[n]: the cost of the assignment, as `Assignment.cost_with` gives it, when piece `one` of `rank` changes places
    with each piece."""
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
    return assignment.cost_with(np.maximum(rest, np.maximum(load[:, rank] + change, load[:, ranks].T - change)))


def _can_swap(assignment: Assignment, units: Ints, ranks: Ints, pieces: Ints, one: int) -> np.ndarray:
    """[n]: whether memory and pins let piece `one` change places with each of the pieces."""
    options, machine = assignment.options, assignment.cluster
    need = options.rank_demand[pieces] - options.rank_demand[pieces[one]]
    rank = ranks[one]
    fits = (assignment.rank_used[rank] + need <= machine.rank_capacity[rank]).all(axis=1)
    fits &= (assignment.rank_used[ranks] - need <= machine.rank_capacity[ranks]).all(axis=1)
    fits &= (options.host_demand[pieces] == options.host_demand[pieces[one]]).all(axis=1) | (
        ranks // machine.devices_per_host == rank // machine.devices_per_host
    )
    for unit, mask in options.allowed_ranks.items():
        fits[units == unit] &= mask[rank]
        if unit == units[one]:
            fits &= mask[ranks]
    return fits
