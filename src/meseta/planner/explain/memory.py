"""Device memory of a topology, and the fullest ranks of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meseta.planner.cost.documented import documented_memory_bytes
from meseta.planner.search.cache_allocation import CacheAllocator, without_cache_rows
from meseta.planner.search.search import PlanResult
from meseta.spec import MesetaError, Topology
from meseta.spec.tiers import HBM, OFFLOADED_TIERS
from meseta.telemetry.formatting import format_bytes


def with_device_memory(topology: Topology, where: str) -> tuple[Topology, str | None]:
    """Return the topology with `hbm_bytes`, and a note if the value is from the data sheet of the device.

    Raises MesetaError, naming `where`, if neither the topology nor a data sheet has the value.
    """
    if topology.hbm_bytes is not None:
        return topology, None
    num_bytes = documented_memory_bytes(topology.device)
    if num_bytes is None:
        raise MesetaError(
            f"{where}: hbm_bytes is missing, so no plan can be checked against the memory of its ranks; add the bytes "
            "of DRAM that each rank may fill, or let `meseta topology detect` write the file"
        )
    note = (
        f"Memory: {format_bytes(num_bytes)} for each {topology.device}, as in its data sheet, since {where} has no "
        "hbm_bytes"
    )
    return replace(topology, hbm_bytes=num_bytes), note


def describe_fullest_ranks(planned: PlanResult) -> str:
    """Return the peak memory of the fullest rank for each memory in use, as text."""
    prediction, topology = planned.prediction, planned.problem.topology
    parts = []
    for memory, rank in prediction.fullest_ranks().items():
        of_all = f" of {format_bytes(topology.hbm_bytes)}" if memory == HBM and topology.hbm_bytes else ""
        parts.append(f"{memory} {format_bytes(float(prediction.peak_bytes(memory)[rank]))}{of_all} on rank {rank}")
    return ", ".join(parts)


CACHE_SHARES = (0.05, 0.1, 0.2, 0.4)
"""Cache sizes relative to all offloaded rows and their optimizer states."""
MISS_HEADERS = ("table", "tier", "cached rows", "% cached", "distinct rows a step", "misses a step")
STEP_HEADERS = ("near", "per rank", "misses a step", "ms a step")


def miss_rows(planned: PlanResult) -> list[tuple[str, ...]]:
    """Return table rows for reports, one per offloaded table, in descending order of misses. Empty without offloaded
    tables."""
    problem, misses = planned.problem, planned.prediction.cache_misses
    loads = problem.loads
    distinct = loads.distinct_rows(loads.whole_tables(), float(problem.workload.batch_size))
    table_rows: list[tuple[str, ...]] = []
    for name, missed in sorted(misses.items(), key=lambda one: (-one[1], one[0])):
        shards = [shard for shard in planned.plan[name].shards if shard.tier in OFFLOADED_TIERS]
        near, rows = sum(shard.cache_rows or 0 for shard in shards), sum(shard.num_rows for shard in shards)
        tiers = "+".join(dict.fromkeys(shard.tier for shard in shards))
        asked = f"{distinct[loads.table_index[name]]:,.0f}"
        table_rows.append((name, tiers, f"{near:,}", f"{100 * near / rows:.1f}", asked, f"{missed:,.0f}"))
    return table_rows


def step_rows_by_share(planned: PlanResult) -> list[tuple[str, ...]]:
    """Return table rows for reports, one per cache size of `CACHE_SHARES`, and one for the plan."""
    problem = planned.problem
    plan = without_cache_rows(planned.plan)
    room = CacheAllocator(plan, problem.loads, problem.topology, problem.cost_model, problem.run)
    table_rows: list[tuple[str, ...]] = []
    for share in CACHE_SHARES:
        budget = share * room.full_cache_bytes
        prediction = room.predict(budget)
        lacks = " (batches in flight need more)" if (budget < room.min_cache_bytes).any() else ""
        of_rank = format_bytes(int(budget.max()))
        step = f"{1e3 * prediction.step_s:.4g}"
        table_rows.append(
            (f"{100 * share:.0f} %{lacks}", of_rank, f"{sum(prediction.cache_misses.values()):,.0f}", step)
        )
    used = room.cache_bytes(planned.plan)
    planned_share = f"as planned, {100 * float(used.sum() / room.full_cache_bytes.sum()):.1f} %"
    missed = f"{sum(planned.prediction.cache_misses.values()):,.0f}"
    table_rows.append(
        (planned_share, format_bytes(int(np.max(used))), missed, f"{1e3 * planned.prediction.step_s:.4g}")
    )
    return table_rows
