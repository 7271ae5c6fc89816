"""Improvement of an assignment by predictions of its plan, if networks correct the constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meseta.planner.cost.predict import Prediction
from meseta.planner.search.assignment import Assignment, Floats, RankScore

PREDICTION_WORK = 6_000
"""Maximum number of predictions, multiplied by the number of units."""
MAX_PREDICTIONS = 120
MAX_MOVED, MAX_TARGETS = 6, 2
"""Maximum number of units that are tried per round, and of ranks to move each of them to."""
MAX_SWAPPED = 3
"""Maximum number of units of another rank that each unit is swapped with."""
MIN_GAIN_SHARE = 1e-6
"""Minimum gain of a change relative to the step."""

Predict = Callable[[Assignment], Prediction]


def refine_by_prediction(assignment: Assignment, predicted: Predict) -> tuple[Assignment, Prediction]:
    """Move or swap single shards of the rank with the longest predicted time, while the predicted step gets shorter.
    Returns the assignment, which may be unchanged, and its prediction."""
    best, left = predicted(assignment), min(PREDICTION_WORK // max(assignment.options.num_units, 1), MAX_PREDICTIONS)
    while left > 0:
        for trial in _neighbors(assignment, best):
            left -= 1
            prediction = predicted(trial)
            if prediction.step_s < best.step_s * (1.0 - MIN_GAIN_SHARE):
                assignment, best = trial, prediction
                break
            if left <= 0:
                return assignment, best
        else:
            break
    return assignment, best


def _neighbors(assignment: Assignment, prediction: Prediction) -> list[Assignment]:
    """Return assignments that differ by one move or swap. Those that should balance ranks best come first."""
    compute_s = prediction.compute_s
    busiest, least = prediction.bottleneck, np.argsort(compute_s, kind="stable")
    on_busiest = [unit for unit in _movable_units(assignment) if assignment.ranks[unit][0] == busiest]
    surplus = 0.5 * (compute_s[busiest] - compute_s[least[0]])
    on_busiest.sort(key=lambda unit: abs(_shard_seconds(assignment, unit) - surplus))
    targets = [int(rank) for rank in least[:MAX_TARGETS] if rank != busiest]
    neighbors = []
    for unit in on_busiest[:MAX_MOVED]:
        neighbors += [_move_units(assignment, {unit: rank}) for rank in targets]
    for rank in targets:
        on_rank = [unit for unit in _movable_units(assignment) if assignment.ranks[unit][0] == rank]
        for unit in on_busiest[:MAX_MOVED]:
            target_s = _shard_seconds(assignment, unit) - 0.5 * (compute_s[busiest] - compute_s[rank])
            partners = sorted(on_rank, key=lambda other: abs(_shard_seconds(assignment, other) - target_s))[
                :MAX_SWAPPED
            ]
            neighbors += [_move_units(assignment, {unit: rank, other: busiest}) for other in partners]
    return [one for one in neighbors if one is not None]


def _movable_units(assignment: Assignment) -> list[int]:
    options = assignment.options
    return [
        u
        for u in range(options.num_units)
        if len(assignment.ranks[u]) == 1 and int(assignment.option[u]) not in options.fixed_ranks
    ]


def _shard_seconds(assignment: Assignment, unit: int) -> float:
    return float(assignment.options.seconds[assignment.options.first_shard[assignment.option[unit]], 0])


def _move_units(assignment: Assignment, ranks: dict[int, int]) -> Assignment | None:
    """Return a copy of the assignment with units on new ranks, or `None` if constraints or memory limits forbid it."""
    trial = assignment.copy()
    options = {unit: trial.remove(unit)[0] for unit in ranks}
    for unit, rank in ranks.items():
        new_ranks = trial.find_ranks(options[unit], _PrioritizedRank(rank))
        if new_ranks is None or new_ranks[0] != rank:
            return None
        trial.place(options[unit], new_ranks)
    return trial


class _PrioritizedRank(RankScore):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        values = np.ones(assignment.cluster.num_ranks)
        values[self._rank] = 0.0
        return values
