"""Local improvement of an assignment by other options, moves and swaps of units on the busiest ranks."""

from __future__ import annotations

import numpy as np

from meseta.planner.search.assignment import AddedCost, Assignment, Floats, Ints

MAX_CANDIDATES = 24
"""Maximum number of units of the busiest ranks that are tried per round."""
MAX_SWAPPED = 8
"""Maximum number of single shards of a busiest rank that are tried for a swap per round."""
MAX_ROUNDS_WITHOUT_GAIN = 30
"""Number of rounds without gain after which perturbation ends."""
# Rounding errors must not cause endless changes.
MIN_GAIN_SHARE = 1e-9
"""Minimum gain of a change relative to the cost."""


def improve_locally(assignment: Assignment, max_rounds: int) -> Assignment:
    """Apply moves and swaps to the assignment in place until none lowers its cost, or balances it better at equal cost.
    Returns it."""
    for _ in range(max_rounds):
        if not (_try_move(assignment) or _try_swap(assignment)):
            break
    return assignment


def perturb_and_reinsert(assignment: Assignment, max_rounds: int, seed: int = 0) -> Assignment:
    """Remove a few units and place them again, in several rounds. Returns the best assignment, which is deterministic
    for a given seed."""
    # Large neighborhood search (P. Shaw, "Using constraint programming and local search methods to solve vehicle
    # routing problems", 1998).
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
    placement = best_placement(assignment, unit, np.inf)
    if placement is None:
        return False
    assignment.place(placement[2], placement[3])
    return True


def _is_better(cost: float, spread: float, than: Assignment) -> bool:
    now = than.cost
    if cost < now * (1 - MIN_GAIN_SHARE):
        return True
    return cost <= now * (1 + MIN_GAIN_SHARE / 10) and spread < than.tie_breaker * (1 - MIN_GAIN_SHARE)


def best_placement(
    assignment: Assignment, unit: int, ceiling: float, *, excluded_option: int = -1
) -> tuple[float, float, int, Ints] | None:
    """Return (cost, tie breaker, option, ranks) of the best placement of an unplaced unit, or `None` if none costs at
    most `ceiling`."""
    options, score, best = assignment.options, AddedCost(), None
    span = options.unit_options(unit)
    least = _cost_lower_bounds(assignment, unit, slice(span.start, span.stop))
    for index in np.argsort(least, kind="stable"):
        # Options are in ascending order of their lower bounds, so no later option is better.
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
    """Return lower bounds of the cost with each option of a unit, with each shard on the least busy rank."""
    options, counted = assignment.options, int(assignment.counted_option[unit])
    load = assignment.load
    busy = np.maximum(load.max(axis=1), load.min(axis=1) + options.max_seconds[span])
    common = assignment.common_seconds - options.common_seconds[counted] + options.common_seconds[span]
    uses = assignment.optional_counts - options.optional_costs[counted] + options.optional_costs[span]
    return options.step_s(busy, common, uses > 0)


def _try_move(assignment: Assignment) -> bool:
    """Move the first unit of the busiest ranks whose best placement is a gain. Returns false if there is none."""
    ceiling = assignment.cost * (1 + MIN_GAIN_SHARE)
    for unit in assignment.busiest_units()[:MAX_CANDIDATES]:
        option, ranks = assignment.remove(unit)
        placement = best_placement(assignment, unit, ceiling)
        assignment.place(option, ranks)
        if placement and _is_better(*placement[:2], assignment):
            assignment.remove(unit)
            assignment.place(placement[2], placement[3])
            return True
    return False


def _try_swap(assignment: Assignment) -> bool:
    """Swap a single shard of a busiest rank with one of another rank. Returns false if no swap is a gain."""
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
        shards = np.flatnonzero(ranks == rank)
        for one in shards[np.argsort(-options.shard_s[pieces[shards]], kind="stable")][:MAX_SWAPPED]:
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
    (option, shards), (other_way, other_ranks) = assignment.remove(one), assignment.remove(other)
    assignment.place(option, other_ranks)
    assignment.place(other_way, shards)
    return True


def _swap_costs(assignment: Assignment, rank: int, ranks: Ints, pieces: Ints, one: int) -> Floats:
    """Return the cost, as in `Assignment.cost_with`, of swapping shard `one` of `rank` with each shard [n]."""
    seconds = assignment.options.seconds
    change = seconds[pieces] - seconds[pieces[one]]  # [n, K]
    load = assignment.load
    remaining = load.copy()
    remaining[:, rank] = -np.inf
    top = remaining.argmax(axis=1)
    first = remaining.max(axis=1)
    remaining[np.arange(len(top)), top] = -np.inf
    second = remaining.max(axis=1)
    rest = np.where(ranks[:, None] == top[None, :], second[None, :], first[None, :])
    return assignment.cost_with(np.maximum(rest, np.maximum(load[:, rank] + change, load[:, ranks].T - change)))


def _can_swap(assignment: Assignment, units: Ints, ranks: Ints, pieces: Ints, one: int) -> np.ndarray:
    """Return a mask [n] of the shards that memory limits and allowed ranks permit to swap with shard `one`."""
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
