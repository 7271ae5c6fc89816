"""Placement of each table in a plan, with its best alternative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.planning import PlanResult
from meseta.planner.search.improve import best_placement


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """Placement of a table, or of several tables that stay together, with its best alternative."""

    tables: tuple[str, ...]
    scheme: str
    """Sharding type, numbers of parts and tier."""
    ranks: tuple[int, ...]
    """Ranks of the shards in ascending order. All ranks for replicas."""
    rank_s: float
    """Seconds per step on the rank where the table takes longest."""
    num_bytes: int
    """Bytes of rows, optimizer states and exchange buffers over all ranks and tiers."""
    runner_up: str | None
    """Scheme of the best alternative, with all other tables unchanged. `None` if no other scheme fits or is allowed."""
    runner_up_s: float
    """Predicted seconds per step with the alternative."""


def explain_tables(planned: PlanResult, units: Sequence[int] | None = None) -> list[TableChoice]:
    """Return the placement of each of `units`, or of all units. Those with the longest time on a rank come first."""
    weights = planned.problem.unit_seconds(planned.assignment.option)
    order = np.argsort(-weights, kind="stable")
    if units is not None:
        order = order[np.isin(order, units)]
    assignment = planned.assignment.copy()
    choices = []
    for unit in order.tolist():
        problem, option = planned.problem, int(assignment.option[unit])
        options, names = problem.options, tuple(problem.workload.tables[table].name for table in problem.units[unit])
        pieces = options.shard_slice(option)
        stored = int(options.rank_demand[pieces, 0].sum() + options.host_demand[pieces].sum())
        everywhere = options.is_replicated[option]
        replicas = int(options.common_demand[option, 0]) * problem.cluster.num_ranks if everywhere else 0
        ranks = range(problem.cluster.num_ranks) if everywhere else sorted(set(assignment.ranks[unit].tolist()))
        own_cost = assignment.cost
        _, places = assignment.remove(unit)
        other = best_placement(assignment, unit, np.inf, excluded_option=option)
        assignment.place(option, places)
        choices.append(
            TableChoice(
                tables=names,
                scheme=problem.describe_option(option),
                ranks=tuple(ranks),
                rank_s=float(weights[unit]),
                num_bytes=stored + replicas,
                runner_up=None if other is None else problem.describe_option(other[2]),
                runner_up_s=planned.prediction.step_s + (0.0 if other is None else other[0] - own_cost),
            )
        )
    return choices
