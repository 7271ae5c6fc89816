"""Baseline planners that place whole tables: random, greedy, largest differencing."""

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
    def __init__(self, num_ranks: int) -> None:
        self.values = np.zeros(num_ranks)

    def __call__(self, assignment: Assignment, seconds: Floats) -> Floats:
        return self.values


def place_at_random(problem: PlacementProblem, seed: int) -> Assignment | None:
    """Place tables in random order, each on a random rank with room. Returns `None` if a table fits nowhere."""
    random = np.random.default_rng([11, seed])
    score, assignment = _Given(problem.cluster.num_ranks), _nothing_placed(problem)
    for option in random.permutation(problem.options.num_units):  # Unit n has one option, n.
        score.values = random.random(problem.cluster.num_ranks)
        ranks = assignment.find_ranks(int(option), score)
        if ranks is None:
            return None
        assignment.place(int(option), ranks)
    return assignment


def place_by_key(problem: PlacementProblem, key: Floats) -> Assignment | None:
    """Place tables in descending order of `key` [tables], each on the rank with room whose sum is smallest."""
    score, assignment = _Given(problem.cluster.num_ranks), _nothing_placed(problem)
    for option in np.argsort(-key, kind="stable"):
        ranks = assignment.find_ranks(int(option), score)
        if ranks is None:
            return None
        assignment.place(int(option), ranks)
        score.values[ranks] += key[option]
    return assignment


def place_by_seconds(problem: PlacementProblem) -> Assignment | None:
    """Place tables by Karmarkar and Karp's largest differencing of predicted seconds. Returns `None` if they do not
    fit."""
    return place_by_differencing(problem.options, problem.cluster, _choice(problem))


def _choice(problem: PlacementProblem) -> Ints:
    return np.arange(problem.options.num_units)


def _nothing_placed(problem: PlacementProblem) -> Assignment:
    return Assignment(problem.options, problem.cluster, _choice(problem))


def sizes(workload: Workload) -> Floats:
    return np.array(
        [shard_storage_bytes(table, table.num_embeddings, table.embedding_dim) for table in workload.tables], np.float64
    )


def dims(workload: Workload) -> Floats:
    return np.array([table.embedding_dim for table in workload.tables], np.float64)


def lookups(workload: Workload) -> Floats:
    """Return columns times ids per sample [tables], the cost of NeuroShard (arXiv 2305.01868)."""
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
"""Placement function of each baseline. Its arguments are a problem of whole tables and a seed."""


def whole_tables(workload: Workload, topology: Topology, cost_model: CostModel) -> PlacementProblem:
    """Return the problem of placing whole tables, with the same memory budget as our planner."""
    rule = TableRule(sharding=(ShardingType.TABLE_WISE,))
    return make_problem(workload, topology, cost_model, Constraints(tables={"*": rule}), tiers=("hbm",))


def baseline_plans(workload: Workload, topology: Topology, cost_model: CostModel, seed: int) -> dict[str, Plan | None]:
    """Return the plan of each baseline, or `None` if it found no placement that fits."""
    problem = whole_tables(workload, topology, cost_model)
    assignments = {name: place(problem, seed) for name, place in BASELINES.items()}
    return {
        name: None if assignment is None else problem.to_plan(assignment) for name, assignment in assignments.items()
    }
