"""Why a plan is as it is: for every table the runner-up, and what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.improve import best_place
from meseta.planner.planning import Planned


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One table of a plan, or several that stay together."""

    tables: tuple[str, ...]
    scheme: str
    """Scheme, parts and tier."""
    ranks: tuple[int, ...]
    """Of its pieces, ascending; all for replicas."""
    rank_s: float
    """Seconds that it takes of the rank it takes most of."""
    num_bytes: int
    """Rows, optimizer state and exchange buffers, over all ranks and tiers."""
    runner_up: str | None
    """The best other scheme, all other tables in place; None where none has room or is allowed."""
    runner_up_s: float
    """Seconds that a step would take with it."""


def reasons(planned: Planned, units: Sequence[int] | None = None) -> list[Reason]:
    """Of `units`, or of all, those first that take most of a rank."""
    weights = planned.problem.unit_seconds(planned.layout.way)
    order = np.argsort(-weights, kind="stable")
    if units is not None:
        order = order[np.isin(order, units)]
    layout = planned.layout.copy()
    found = []
    for unit in order.tolist():
        problem, way = planned.problem, int(layout.way[unit])
        ways, names = problem.ways, tuple(problem.workload.tables[table].name for table in problem.units[unit])
        pieces = ways.pieces(way)
        stored = int(ways.rank_need[pieces, 0].sum() + ways.host_need[pieces].sum())
        everywhere = ways.everywhere[way]
        replicas = int(ways.common_need[way, 0]) * problem.machine.num_ranks if everywhere else 0
        ranks = range(problem.machine.num_ranks) if everywhere else sorted(set(layout.ranks[unit].tolist()))
        own_cost = layout.cost
        _, places = layout.remove(unit)
        other = best_place(layout, unit, np.inf, without=way)
        layout.add(way, places)
        found.append(
            Reason(
                tables=names,
                scheme=problem.describe(way),
                ranks=tuple(ranks),
                rank_s=float(weights[unit]),
                num_bytes=stored + replicas,
                runner_up=None if other is None else problem.describe(other[2]),
                runner_up_s=planned.prediction.step_s + (0.0 if other is None else other[0] - own_cost),
            )
        )
    return found
