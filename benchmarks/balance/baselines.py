"""Planners that others have: whole tables, at random, greedily, or by largest differencing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from meseta.planner.cost.loads import shard_storage_bytes
from meseta.planner.search.assignment import Assignment, Floats, Ints, RankScore
from meseta.planner.search.partition import place_by_differencing
from meseta.planner.search.problem import PlacementProblem, make_problem
from meseta.spec import CostModel, Plan, ShardingType, Topology, Workload
from meseta.spec.constraints import Constraints, TableRule


class _Given(RankScore):
    """Numbers that the caller sets."""

    def __init__(self, num_ranks: int) -> None:
        self.values = np.zeros(num_ranks)

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        return self.values


def place_at_random(problem: PlacementProblem, seed: int) -> Assignment | None:
    """Tables in random order, each on a random rank of those with room; None where one finds none."""
    random = np.random.default_rng([11, seed])
    score, assignment = _Given(problem.cluster.num_ranks), _nothing_placed(problem)
    for option in random.permutation(problem.options.num_units):  # of each unit there is one option, of its own number
        score.values = random.random(problem.cluster.num_ranks)
        ranks = assignment.find_ranks(int(option), score)
        if ranks is None:
            return None
        assignment.place(int(option), ranks)
    return assignment


def place_by_key(problem: PlacementProblem, key: Floats) -> Assignment | None:
    """Tables by a number each [tables], largest first, to the rank whose tables have the least sum of it, of those with
    room; None where a table finds none."""
    score, assignment = _Given(problem.cluster.num_ranks), _nothing_placed(problem)
    for option in np.argsort(-key, kind="stable"):
        ranks = assignment.find_ranks(int(option), score)
        if ranks is None:
            return None
        assignment.place(int(option), ranks)
        score.values[ranks] += key[option]
    return assignment


def place_by_seconds(problem: PlacementProblem) -> Assignment | None:
    """Karmarkar and Karp's largest differencing of what whole tables are predicted to take; where ranks are too full,
    some of their tables are placed greedily. None where the tables do not fit."""
    return place_by_differencing(problem.options, problem.cluster, _choice(problem))


def _choice(problem: PlacementProblem) -> Ints:
    return np.arange(problem.options.num_units)


def _nothing_placed(problem: PlacementProblem) -> Assignment:
    return Assignment(problem.options, problem.cluster, _choice(problem))


def sizes(workload: Workload) -> Floats:
    """[tables]: bytes of rows and optimizer state."""
    return np.array(
        [shard_storage_bytes(own, own.num_embeddings, own.embedding_dim) for own in workload.tables], np.float64
    )


def dims(workload: Workload) -> Floats:
    """[tables]: columns."""
    return np.array([own.embedding_dim for own in workload.tables], np.float64)


def lookups(workload: Workload) -> Floats:
    """[tables]: columns times ids per sample, as NeuroShard (D. Zha et al., arXiv 2305.01868) takes lookups."""
    pooling = dict.fromkeys((table.name for table in workload.tables), 0.0)
    for feature in workload.features:
        pooling[feature.table] += workload.load(feature).pooling_factor
    return dims(workload) * np.array(list(pooling.values()))


BASELINES: Mapping[str, Callable[[PlacementProblem, int], Assignment | None]] = {
    "random": place_at_random,
    "greedy by size": lambda problem, _: place_by_key(problem, sizes(problem.workload)),
    "greedy by dim": lambda problem, _: place_by_key(problem, dims(problem.workload)),
    "greedy by lookups": lambda problem, _: place_by_key(problem, lookups(problem.workload)),
    "LDM": lambda problem, _: place_by_seconds(problem),
}
"""By name: the assignment of a problem of whole tables, given a seed."""


def whole_tables(workload: Workload, topology: Topology, cost_model: CostModel) -> PlacementProblem:
    """The problem in which tables are not cut; unit and option n are table n. Room is what our own plans have: memory
    but for what a step's buffers take."""
    rule = TableRule(sharding=(ShardingType.TABLE_WISE,))
    return make_problem(workload, topology, cost_model, Constraints(tables={"*": rule}), tiers=("hbm",))


def baseline_plans(workload: Workload, topology: Topology, cost_model: CostModel, seed: int) -> dict[str, Plan | None]:
    """The plan of each baseline; None where it has found no placement that fits."""
    problem = whole_tables(workload, topology, cost_model)
    assignments = {name: place(problem, seed) for name, place in BASELINES.items()}
    return {
        name: None if assignment is None else problem.to_plan(assignment) for name, assignment in assignments.items()
    }
