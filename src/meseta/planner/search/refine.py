"""Improvement of an assignment by what its plan is predicted to take, where that is more than a sum of prices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meseta.planner.cost.predict import Prediction
from meseta.planner.search.assignment import Assignment, Floats, RankScore

PREDICTION_WORK = 6_000
"""Units times changes that are judged."""
MAX_PREDICTIONS = 120
MAX_MOVED, MAX_TARGETS = 6, 2
"""Units of the busiest rank that are tried in a round, and ranks that each is moved to."""
MAX_SWAPPED = 3
"""Units of another rank that each is exchanged with."""
MIN_GAIN_SHARE = 1e-6
"""A change must gain more than this share of the step."""

Predict = Callable[[Assignment], Prediction]


def refine_by_prediction(assignment: Assignment, predicted: Predict) -> tuple[Assignment, Prediction]:
    """Move single pieces away from the rank that is predicted to be busiest, or exchange them with others, as long as
    the predicted step gets shorter; in the order of what is likely to help, and bounded by counts. Returns the
    assignment, perhaps the same, and its prediction."""
    best, left = predicted(assignment), min(PREDICTION_WORK // max(assignment.options.num_units, 1), MAX_PREDICTIONS)
    while left > 0:
        for trial in _neighbors(assignment, best):
            left -= 1
            found = predicted(trial)
            if found.step_s < best.step_s * (1.0 - MIN_GAIN_SHARE):
                assignment, best = trial, found
                break
            if left <= 0:
                return assignment, best
        else:
            break
    return assignment, best


def _neighbors(assignment: Assignment, prediction: Prediction) -> list[Assignment]:
    """Assignments that differ by one move or one exchange, those that should even the ranks out most first."""
    compute_s = prediction.compute_s
    busiest, least = prediction.bottleneck, np.argsort(compute_s, kind="stable")
    mine = [unit for unit in _movable_units(assignment) if assignment.ranks[unit][0] == busiest]
    surplus = 0.5 * (compute_s[busiest] - compute_s[least[0]])
    mine.sort(key=lambda unit: abs(_shard_seconds(assignment, unit) - surplus))
    targets = [int(rank) for rank in least[:MAX_TARGETS] if rank != busiest]
    found = []
    for unit in mine[:MAX_MOVED]:
        found += [_move_units(assignment, {unit: rank}) for rank in targets]
    for rank in targets:
        theirs = [unit for unit in _movable_units(assignment) if assignment.ranks[unit][0] == rank]
        for unit in mine[:MAX_MOVED]:
            wanted = _shard_seconds(assignment, unit) - 0.5 * (compute_s[busiest] - compute_s[rank])
            near = sorted(theirs, key=lambda other: abs(_shard_seconds(assignment, other) - wanted))[:MAX_SWAPPED]
            found += [_move_units(assignment, {unit: rank, other: busiest}) for other in near]
    return [one for one in found if one is not None]


def _movable_units(assignment: Assignment) -> list[int]:
    """Units of one piece that may lie elsewhere."""
    options = assignment.options
    return [
        u
        for u in range(options.num_units)
        if len(assignment.ranks[u]) == 1 and int(assignment.option[u]) not in options.fixed_ranks
    ]


def _shard_seconds(assignment: Assignment, unit: int) -> float:
    """Lookup and update of a unit's piece, by the prices."""
    return float(assignment.options.seconds[assignment.options.first_shard[assignment.option[unit]], 0])


def _move_units(assignment: Assignment, ranks: dict[int, int]) -> Assignment | None:
    """A copy with each of these units on its new rank; None where rules or room forbid it."""
    trial = assignment.copy()
    options = {unit: trial.remove(unit)[0] for unit in ranks}
    for unit, rank in ranks.items():
        found = trial.find_ranks(options[unit], _PrioritizedRank(rank))
        if found is None or found[0] != rank:
            return None
        trial.place(options[unit], found)
    return trial


class _PrioritizedRank(RankScore):
    """One rank before all others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        values = np.ones(assignment.cluster.num_ranks)
        values[self._rank] = 0.0
        return values
