"""What rows that lie near save: rows that a step brings, by table, and the step with more or fewer of them near."""

from __future__ import annotations

import numpy as np

from meseta.planner.search.near_rows import NearRoom, without_near_rows
from meseta.planner.search.planned import Planned
from meseta.spec.tiers import FAR_TIERS
from meseta.telemetry.shown import byte_size

SHARES = (0.05, 0.1, 0.2, 0.4)
"""Of the bytes of all rows that may lie far, with their states."""
MISSED_HEADS = ("table", "tier", "rows near", "% near", "distinct a step", "misses a step")
STEP_HEADS = ("near", "of each rank", "misses a step", "ms a step")


def missed_rows(planned: Planned) -> list[tuple[str, ...]]:
    """Cells of one table each, those of most misses first; empty where no rows lie far."""
    problem, misses = planned.problem, planned.prediction.misses
    loads = problem.loads
    distinct = loads.distinct(loads.whole(), float(problem.workload.batch_size))
    found: list[tuple[str, ...]] = []
    for name, missed in sorted(misses.items(), key=lambda one: (-one[1], one[0])):
        shards = [shard for shard in planned.plan[name].shards if shard.tier in FAR_TIERS]
        near, rows = sum(shard.near_rows or 0 for shard in shards), sum(shard.num_rows for shard in shards)
        tiers = "+".join(dict.fromkeys(shard.tier for shard in shards))
        asked = f"{distinct[loads.index[name]]:,.0f}"
        found.append((name, tiers, f"{near:,}", f"{100 * near / rows:.1f}", asked, f"{missed:,.0f}"))
    return found


def steps_by_share(planned: Planned) -> list[tuple[str, ...]]:
    """Cells of one share of the bytes near each, and of the plan itself."""
    problem = planned.problem
    plan = without_near_rows(planned.plan)
    room = NearRoom(plan, problem.loads, problem.topology, problem.cost_model, problem.run)
    found: list[tuple[str, ...]] = []
    for share in SHARES:
        budget = room.share(share)
        prediction = room.predict(budget)
        lacks = " (batches under way need more)" if (budget < room.least_bytes).any() else ""
        of_rank = byte_size(int(budget.max()))
        step = f"{1e3 * prediction.step_s:.4g}"
        found.append((f"{100 * share:.0f} %{lacks}", of_rank, f"{sum(prediction.misses.values()):,.0f}", step))
    used = room.bytes_of(planned.plan)
    planned_share = f"as planned, {100 * float(used.sum() / room.all_bytes.sum()):.1f} %"
    missed = f"{sum(planned.prediction.misses.values()):,.0f}"
    found.append((planned_share, byte_size(int(np.max(used))), missed, f"{1e3 * planned.prediction.step_s:.4g}"))
    return found
