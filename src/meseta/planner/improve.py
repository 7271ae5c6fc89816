"""Local improvement of a layout: other ways, moves and swaps for what the busiest ranks hold."""

from __future__ import annotations

import numpy as np

from meseta.planner.layout import AddedCost, Floats, Ints, Layout

MAX_CANDIDATES = 24
"""Units of the busiest ranks that are tried in one round."""
MAX_SWAPPED = 8
"""Single pieces of a busiest rank that are offered for exchange in one round."""
MAX_IN_VAIN = 30
"""Rounds without gain after which shaking ends."""
TOLERANCE = 1e-9
"""A change must gain more than this share of the cost, so that rounding does not go round in circles."""


def improve(layout: Layout, max_rounds: int) -> Layout:
    """Change the layout as long as that lowers its cost, or evens out what is equally busy; returns it.

    In each round the units on the ranks that end a component last are tried in all their ways on the best ranks for
    them; where none of that helps, they are exchanged with single pieces of other ranks.
    """
    for _ in range(max_rounds):
        if not (_move_one(layout) or _swap_one(layout)):
            break
    return layout


def shake(layout: Layout, max_rounds: int, seed: int = 0) -> Layout:
    """Take a few units away and place them anew, in each round others, and keep what is better.

    Source: P. Shaw, "Using constraint programming and local search methods to solve vehicle routing problems" (1998),
    as large neighbourhood search. The same seed gives the same layout.
    """
    random = np.random.default_rng(seed)
    best, num_units, in_vain = layout, layout.ways.num_units, 0
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


def _add_best(layout: Layout, unit: int) -> bool:
    """Place a unit in the way that costs least now; False where none has room."""
    found = best_place(layout, unit, np.inf)
    if found is None:
        return False
    layout.add(found[2], found[3])
    return True


def _is_better(cost: float, spread: float, than: Layout) -> bool:
    now = than.cost
    if cost < now * (1 - TOLERANCE):
        return True
    return cost <= now * (1 + TOLERANCE / 10) and spread < than.spread * (1 - TOLERANCE)


def best_place(
    layout: Layout, unit: int, ceiling: float, *, without: int = -1
) -> tuple[float, float, int, Ints] | None:
    """(cost, spread, way, ranks) of the best place for a unit that is not placed, of those that may cost no more than
    `ceiling`, in any way but `without`; None where there is none."""
    ways, score, best = layout.ways, AddedCost(), None
    span = ways.of_unit(unit)
    least = _least_costs(layout, unit, slice(span.start, span.stop))
    for index in np.argsort(least, kind="stable"):
        if least[index] > (ceiling if best is None else best[0]):
            break
        way = span[int(index)]
        ranks = layout.find(way, score) if way != without else None
        if ranks is not None:
            layout.add(way, ranks)
            result = (layout.cost, layout.spread, way, ranks)
            layout.remove(unit)
            if best is None or result[:2] < best[:2]:
                best = result
    return best


def _least_costs(layout: Layout, unit: int, span: slice) -> Floats:
    """[w]: costs below which no place for a unit in each of its ways can go: every piece on the least busy rank."""
    ways, counted = layout.ways, int(layout.counted[unit])
    load = layout.load
    busy = np.maximum(load.max(axis=1), load.min(axis=1) + ways.longest[span]).sum(axis=1)
    common = (layout.common - ways.common_seconds[counted] + ways.common_seconds[span]).sum(axis=1)
    uses = layout.uses - ways.uses[counted] + ways.uses[span]
    return busy + common + (uses > 0) @ ways.use_s


def _move_one(layout: Layout) -> bool:
    """Give the first unit of the busiest ranks that gains by it its best other place; False where none does."""
    ceiling = layout.cost * (1 + TOLERANCE)
    for unit in layout.busiest_units()[:MAX_CANDIDATES]:
        way, ranks = layout.remove(unit)
        found = best_place(layout, unit, ceiling)
        layout.add(way, ranks)
        if found and _is_better(*found[:2], layout):
            layout.remove(unit)
            layout.add(found[2], found[3])
            return True
    return False


def _swap_one(layout: Layout) -> bool:
    """Exchange a single piece of a busiest rank with one of another rank; False where that helps nothing."""
    ways = layout.ways
    single = [
        u
        for u in range(ways.num_units)
        if len(layout.ranks[u]) == 1 and u not in ways.apart and int(layout.way[u]) not in ways.fixed
    ]
    if not single:
        return False
    units = np.array(single)
    ranks = np.array([layout.ranks[unit][0] for unit in single])
    pieces = ways.first[layout.way[units]]
    best = None
    now = float(layout.load.max(axis=1).sum())
    for rank in layout.busiest_ranks():
        mine = np.flatnonzero(ranks == rank)
        for one in mine[np.argsort(-ways.seconds[pieces[mine]].sum(axis=1), kind="stable")][:MAX_SWAPPED]:
            costs = _swapped_costs(layout, int(rank), ranks, pieces, int(one))
            if costs.min() >= (now * (1 - TOLERANCE) if best is None else best[0]):
                continue
            costs[(ranks == rank) | ~_may_swap(layout, units, ranks, pieces, int(one))] = np.inf
            other = int(costs.argmin())
            if costs[other] < (now * (1 - TOLERANCE) if best is None else best[0]):
                best = float(costs[other]), int(units[one]), int(units[other])
    if best is None:
        return False
    _, one, other = best
    (way, mine), (other_way, theirs) = layout.remove(one), layout.remove(other)
    layout.add(way, theirs)
    layout.add(other_way, mine)
    return True


def _swapped_costs(layout: Layout, rank: int, ranks: Ints, pieces: Ints, one: int) -> Floats:
    """[n]: the cost of the layout, less what is common, when piece `one` of `rank` changes places with each piece."""
    seconds = layout.ways.seconds
    change = seconds[pieces] - seconds[pieces[one]]  # [n, K]
    load = layout.load
    others = load.copy()
    others[:, rank] = -np.inf
    top = others.argmax(axis=1)
    first = others.max(axis=1)
    others[np.arange(len(top)), top] = -np.inf
    second = others.max(axis=1)
    rest = np.where(ranks[:, None] == top[None, :], second[None, :], first[None, :])
    return np.maximum(rest, np.maximum(load[:, rank] + change, load[:, ranks].T - change)).sum(axis=1)


def _may_swap(layout: Layout, units: Ints, ranks: Ints, pieces: Ints, one: int) -> np.ndarray:
    """[n]: whether memory and pins let piece `one` change places with each of the pieces."""
    ways, machine = layout.ways, layout.machine
    need = ways.rank_need[pieces] - ways.rank_need[pieces[one]]
    rank = ranks[one]
    fits = (layout.rank_used[rank] + need <= machine.rank_room[rank]).all(axis=1)
    fits &= (layout.rank_used[ranks] - need <= machine.rank_room[ranks]).all(axis=1)
    fits &= (ways.host_need[pieces] == ways.host_need[pieces[one]]).all(axis=1) | (
        ranks // machine.devices_per_host == rank // machine.devices_per_host
    )
    for unit, mask in ways.allowed.items():
        fits[units == unit] &= mask[rank]
        if unit == units[one]:
            fits &= mask[ranks]
    return fits
