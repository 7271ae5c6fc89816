"""Placement of each table in a plan, with its best alternative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.loads import shard_storage_bytes
from meseta.planner.planning import PlanResult
from meseta.planner.search.improve import best_placement
from meseta.spec import MesetaError, Plan, Shard, TableSpec


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


@dataclass(frozen=True, kw_only=True)
class TableMove:
    """Change of the placement of a table between two plans."""

    table: str
    before: str
    """Sharding type and ranks in the first plan. Empty if the plan does not have the table."""
    after: str
    """Sharding type and ranks in the second plan. Empty if the plan does not have the table."""
    num_rows: int
    """Number of rows that move to a rank that did not have them, summed over ranks."""
    num_bytes: int
    """Bytes that move, including optimizer states."""


def diff_plans(before: Plan, after: Plan, tables: Mapping[str, TableSpec]) -> list[TableMove]:
    """Return the tables with a different placement, in descending order of the bytes that move.

    New tables and new rows count as moved. A change of tier is a change of placement. Raises MesetaError if `tables`
    lacks a table of the second plan.

    Args:
        before: First plan.
        after: Second plan.
        tables: Tables by name.
    """
    old = {entry.table: entry for entry in before.tables}
    moves = []
    for entry in after.tables:
        if entry.table not in tables:
            raise MesetaError(
                f"plan diff: table {entry.table!r} of the second plan is not in the model; pass the config of its model"
            )
        rows = num_bytes = 0
        sources = old[entry.table].shards if entry.table in old else ()
        for shard in entry.shards:
            for rank in shard.ranks:
                missing_rows, missing_cells = _missing_cells(
                    shard, [s for s in sources if rank in s.ranks and s.tier == shard.tier]
                )
                rows += missing_rows
                num_bytes += shard_storage_bytes(tables[entry.table], missing_cells, 1)
        earlier = old.pop(entry.table, None)
        if rows or earlier is None or earlier.sharding != entry.sharding:
            source = "" if earlier is None else describe_placement(str(earlier.sharding), earlier.shards)
            moves.append(
                TableMove(
                    table=entry.table,
                    before=source,
                    after=describe_placement(str(entry.sharding), entry.shards),
                    num_rows=rows,
                    num_bytes=num_bytes,
                )
            )
    for entry in old.values():
        gone = describe_placement(str(entry.sharding), entry.shards)
        moves.append(TableMove(table=entry.table, before=gone, after="", num_rows=0, num_bytes=0))
    return sorted(moves, key=lambda one: (-one.num_bytes, one.table))


def _missing_cells(shard: Shard, held: list[Shard]) -> tuple[int, int]:
    rows = cells = 0
    for other in held:
        common = min(shard.rows[1], other.rows[1]) - max(shard.rows[0], other.rows[0])
        width = min(shard.columns[1], other.columns[1]) - max(shard.columns[0], other.columns[0])
        if common > 0 and width > 0:
            cells += common * width
            rows += common if width == shard.num_columns else 0
    return max(shard.num_rows - rows, 0), shard.num_rows * shard.num_columns - cells


def describe_placement(sharding: str, shards: tuple[Shard, ...]) -> str:
    """Return the sharding type with its ranks, such as 'row_wise on 0-3'."""
    ranks = sorted({rank for shard in shards for rank in shard.ranks})
    return f"{sharding} on {format_ranks(ranks)}"


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ascending ranks as ranges, such as '0-3, 7', or their number if there are more than four ranges."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    if len(ranges) > 4:
        return f"{len(ranks)} ranks"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "none"
