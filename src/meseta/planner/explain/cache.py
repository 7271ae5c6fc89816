"""What rows that lie near save: rows that a step brings, by table, and the step with more or fewer of them near."""

from __future__ import annotations

import numpy as np

from meseta.planner.search.cache_allocation import CacheAllocator, without_cache_rows
from meseta.planner.search.plan_result import PlanResult
from meseta.spec.tiers import OFFLOADED_TIERS
from meseta.telemetry.formatting import format_bytes

CACHE_SHARES = (0.05, 0.1, 0.2, 0.4)
"""Of the bytes of all rows that may lie far, with their states."""
MISS_HEADERS = ("table", "tier", "rows near", "% near", "distinct a step", "misses a step")
STEP_HEADERS = ("near", "of each rank", "misses a step", "ms a step")


def miss_rows(planned: PlanResult) -> list[tuple[str, ...]]:
    """Cells of one table each, those of most misses first; empty where no rows lie far."""
    problem, misses = planned.problem, planned.prediction.cache_misses
    loads = problem.loads
    distinct = loads.distinct_rows(loads.whole_tables(), float(problem.workload.batch_size))
    found: list[tuple[str, ...]] = []
    for name, missed in sorted(misses.items(), key=lambda one: (-one[1], one[0])):
        shards = [shard for shard in planned.plan[name].shards if shard.tier in OFFLOADED_TIERS]
        near, rows = sum(shard.cache_rows or 0 for shard in shards), sum(shard.num_rows for shard in shards)
        tiers = "+".join(dict.fromkeys(shard.tier for shard in shards))
        asked = f"{distinct[loads.table_index[name]]:,.0f}"
        found.append((name, tiers, f"{near:,}", f"{100 * near / rows:.1f}", asked, f"{missed:,.0f}"))
    return found


def step_rows_by_share(planned: PlanResult) -> list[tuple[str, ...]]:
    """Cells of one share of the bytes near each, and of the plan itself."""
    problem = planned.problem
    plan = without_cache_rows(planned.plan)
    room = CacheAllocator(plan, problem.loads, problem.topology, problem.cost_model, problem.run)
    found: list[tuple[str, ...]] = []
    for share in CACHE_SHARES:
        budget = room.bytes_for_share(share)
        prediction = room.predict(budget)
        lacks = " (batches under way need more)" if (budget < room.min_cache_bytes).any() else ""
        of_rank = format_bytes(int(budget.max()))
        step = f"{1e3 * prediction.step_s:.4g}"
        found.append((f"{100 * share:.0f} %{lacks}", of_rank, f"{sum(prediction.cache_misses.values()):,.0f}", step))
    used = room.cache_bytes(planned.plan)
    planned_share = f"as planned, {100 * float(used.sum() / room.full_cache_bytes.sum()):.1f} %"
    missed = f"{sum(planned.prediction.cache_misses.values()):,.0f}"
    found.append((planned_share, format_bytes(int(np.max(used))), missed, f"{1e3 * planned.prediction.step_s:.4g}"))
    return found
