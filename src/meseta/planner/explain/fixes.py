"""Reason why no plan fits, and the smallest changes after which a plan exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meseta.errors import join_names
from meseta.planner.cost.loads import WorkloadLoads, shard_storage_bytes
from meseta.planner.cost.memory import RunBytes, fixed_bytes
from meseta.planner.search.assignment import UNLIMITED, BusySeconds
from meseta.planner.search.cost_estimator import ShardCostEstimator
from meseta.planner.search.option_costs import OptionCosts
from meseta.planner.search.partition import place_greedily
from meseta.planner.search.problem import PlacementProblem, make_problem
from meseta.spec import CostModel, MesetaError, ShardingType, TableSpec, Topology, Workload
from meseta.spec.constraints import Constraints, TableRule
from meseta.spec.tables import TableDtype
from meseta.spec.tiers import HBM, Tier
from meseta.telemetry.formatting import format_bytes

MAX_FACTOR = 16
"""Maximum number of hosts, or amount of memory, that is tried, relative to the estimated need."""
_HALF_DTYPES: dict[TableDtype, TableDtype] = {"float32": "float16", "float64": "float32"}


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """Input of a search for a plan."""

    workload: Workload
    topology: Topology
    cost_model: CostModel
    constraints: Constraints
    run: RunBytes | None = None
    """Memory that a run needs in addition to its plan."""
    excluded_tiers: tuple[Tier, ...] = ()
    """Tiers that the run cannot use on these devices."""

    @property
    def tier_sets(self) -> list[tuple[Tier, ...]]:
        """Sets of tiers to try, in order: device memory only, then all tiers."""
        tiers = tuple(tier for tier in self.topology.spill_tiers if tier not in self.excluded_tiers)
        return [(HBM,), tiers] if len(tiers) > 1 else [(HBM,)]


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Change after which a plan exists."""

    description: str
    """Instruction to the user."""
    task: PlanTask
    """Input with the change applied."""
    step_s: float
    """Predicted seconds per step with the change."""


def explain_infeasibility(problem: PlacementProblem) -> str:
    """Return the error message that names the tables and bytes that exceed the memory of the machines."""
    costs, machine = OptionCosts(problem), problem.cluster
    least = np.minimum.reduceat(
        costs.num_bytes.sum(axis=1), np.searchsorted(problem.options.unit_index, np.arange(len(problem.units)))
    )
    room = costs.capacity.sum()
    room_of_one = int(machine.rank_capacity[0, 0])
    parts = []
    if least.sum() > room:
        parts.append(
            f"the tables need at least {format_bytes(least.sum())} with optimizer states and exchange buffers, but the "
            f"machines have {format_bytes(room)} for them: {format_bytes(least.sum() - room)} too much"
        )
    stuck = _oversized_tables(problem, costs)
    if stuck:
        worst = ", ".join(f"{name!r} {format_bytes(size)}" for name, size in stuck[:3])
        more = f" and {len(stuck) - 3} more" * (len(stuck) > 3)
        parts.append(
            f"the smallest shard that constraints allow for {worst}{more} is larger than the memory of a device, "
            f"{format_bytes(room_of_one)}"
        )
    if not parts:
        parts.append(
            f"the tables need {format_bytes(least.sum())} of the {format_bytes(room)} that the machines have for "
            "them, but no placement satisfies the memory limits of each rank and the constraints"
        )
    order = np.argsort(-least, kind="stable")[:3]
    names = ", ".join(f"{problem.workload.tables[problem.units[u][0]].name!r} {format_bytes(least[u])}" for u in order)
    return f"planner: no plan fits: {'; '.join(parts)}; the largest tables are {names}"


def _oversized_tables(problem: PlacementProblem, costs: OptionCosts) -> list[tuple[str, float]]:
    """Return (name, bytes of the smallest possible shard) of each table that does not fit on a device in any option."""
    starts = np.searchsorted(problem.options.unit_index, np.arange(len(problem.units)))
    smallest = np.minimum.reduceat(costs.max_shard_bytes, starts)
    oversized = [(smallest[unit], unit) for unit in np.flatnonzero(smallest > costs.device_capacity)]
    return [
        (problem.workload.tables[problem.units[unit][0]].name, float(size))
        for size, unit in sorted(oversized, key=lambda one: (-one[0], one[1]))
    ]


def is_feasible(task: PlanTask) -> bool:
    """Whether a construction finds a plan. The result may be a false negative."""
    topology = task.topology
    prices = ShardCostEstimator(WorkloadLoads(task.workload), topology, task.cost_model, run=task.run)
    for tiers in task.tier_sets:
        try:
            problem = make_problem(
                task.workload, topology, task.cost_model, task.constraints, tiers=tiers, estimator=prices
            )
        except MesetaError:
            return False
        costs = OptionCosts(problem)
        everything = np.ones(len(costs.unit_index), np.bool_)
        for share in (1.0, 0.5, 0.2, 0.1):
            choice = costs.choose_options(everything, np.inf, share)
            if place_greedily(problem.options, problem.cluster, choice, BusySeconds()) is not None:
                return True
    return False


def find_fixes(task: PlanTask, plan_step_s: Callable[[PlanTask], float | None]) -> list[Fix]:
    """Return single changes after which a plan exists, in ascending order of the predicted step. Changes of the
    topology are last.

    Args:
        task: Input for which no plan was found.
        plan_step_s: Function that returns the predicted seconds per step of the plan for an input, or `None` if none is
            found.
    """
    fixes = []
    for needs_machines, text, changed in _candidate_fixes(task):
        step_s = plan_step_s(changed)
        if step_s is not None:
            fixes.append((needs_machines, step_s, Fix(description=text, task=changed, step_s=step_s)))
    return [fix for _, _, fix in sorted(fixes, key=lambda one: one[:2])]


def _candidate_fixes(task: PlanTask) -> Iterator[tuple[bool, str, PlanTask]]:
    """Yield (changes_topology, description, task) for the smallest feasible change of each kind."""
    # Changes apply to the largest tables first.
    largest = sorted(task.workload.tables, key=lambda t: (-t.num_embeddings * t.embedding_dim, t.name))
    kinds: list[tuple[Callable[[PlanTask, Sequence[TableSpec]], tuple[str, PlanTask]], list[TableSpec]]] = [
        (_allow_row_wise, [t for t in largest if task.constraints.rule(t.name).sharding is not None]),
        (_halve_dtypes, [t for t in largest if _can_halve(t, task.constraints)]),
        (_allow_all_tiers, [t for t in largest if _is_tier_restricted(t, task)]),
    ]
    for make, candidates in kinds:
        change = partial(_apply_change, task, make, candidates)
        count = _find_min_count(len(candidates), change)
        if count is not None:
            yield (False, *make(task, candidates[:count]))
    for text, changed in _relaxed_constraints(task):
        if is_feasible(changed):
            yield False, text, changed
    yield from _larger_topologies(task)


def _apply_change(
    task: PlanTask,
    make: Callable[[PlanTask, Sequence[TableSpec]], tuple[str, PlanTask]],
    tables: Sequence[TableSpec],
    count: int,
) -> PlanTask:
    return make(task, tables[:count])[1]


def _find_min_count(most: int, change: Callable[[int], PlanTask]) -> int | None:
    """Return the smallest count from 1 to `most` for which a plan exists, or `None`."""
    if not most or not is_feasible(change(most)):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_feasible(change(middle)) else (middle, high)
    return high


def _allow_row_wise(task: PlanTask, tables: Sequence[TableSpec]) -> tuple[str, PlanTask]:
    ranks = task.topology.num_ranks
    return (
        f"allow row_wise on up to {ranks} ranks for {_format_tables(tables)}",
        _with_rules(
            task,
            tables,
            lambda rule: replace(rule, sharding=(*(rule.sharding or ()), ShardingType.ROW_WISE)),
        ),
    )


def _halve_dtypes(task: PlanTask, tables: Sequence[TableSpec]) -> tuple[str, PlanTask]:
    names = {table.name for table in tables}
    changed = tuple(replace(t, dtype=_HALF_DTYPES[t.dtype]) if t.name in names else t for t in task.workload.tables)
    types = " and ".join(sorted({_HALF_DTYPES[table.dtype] for table in tables}))
    return f"store the rows of {_format_tables(tables)} in {types}", replace(
        task, workload=replace(task.workload, tables=changed)
    )


def _can_halve(table: TableSpec, constraints: Constraints) -> bool:
    allowed, half = constraints.rule(table.name).dtypes, _HALF_DTYPES.get(table.dtype)
    if half is None or (table.average is not None and half != "float32"):
        return False
    return allowed is None or half in allowed


def _allow_all_tiers(task: PlanTask, tables: Sequence[TableSpec]) -> tuple[str, PlanTask]:
    tiers = tuple(tier for tier in task.topology.tiers if tier not in task.excluded_tiers)
    text = f"allow the tiers {', '.join(tiers)} for {_format_tables(tables)}"
    return text, _with_rules(task, tables, lambda rule: replace(rule, tiers=tiers))


def _is_tier_restricted(table: TableSpec, task: PlanTask) -> bool:
    tiers = task.constraints.rule(table.name).tiers
    return tiers is not None and len(task.tier_sets) > 1


def _with_rules(task: PlanTask, tables: Sequence[TableSpec], change: Callable[[TableRule], TableRule]) -> PlanTask:
    rules = dict(task.constraints.tables)
    rules |= {table.name: change(task.constraints.rule(table.name)) for table in tables}
    return replace(task, constraints=replace(task.constraints, tables=rules))


def _relaxed_constraints(task: PlanTask) -> Iterator[tuple[str, PlanTask]]:
    constraints = task.constraints
    if constraints.max_tables_per_rank is not None:
        yield "drop max_tables_per_rank", replace(task, constraints=replace(constraints, max_tables_per_rank=None))
    if constraints.keep_free_bytes:
        yield "drop keep_free_bytes", replace(task, constraints=replace(constraints, keep_free_bytes={}))
    if constraints.apart:
        yield "drop the groups of tables that must be apart", replace(task, constraints=replace(constraints, apart=()))


def _larger_topologies(task: PlanTask) -> Iterator[tuple[bool, str, PlanTask]]:
    """Yield topologies with more hosts, and with memory for offloaded tables: host DRAM, or disks for CPU ranks."""
    topology = task.topology

    def hosts(extra: int) -> PlanTask:
        return replace(task, topology=replace(topology, num_hosts=topology.num_hosts + extra))

    num_bytes = sum(shard_storage_bytes(t, t.num_embeddings, t.embedding_dim) for t in task.workload.tables)
    on_devices = (topology.hbm_bytes or 0) * topology.devices_per_host
    of_host = on_devices + (topology.host_bytes or 0) + (topology.disk_bytes or 0)
    extra = _find_min_count_by_doubling(hosts, max(num_bytes // max(of_host, 1) + 1 - topology.num_hosts, 1))
    if extra is not None:
        yield True, f"use {extra} more host{'s' * (extra > 1)}, {topology.num_hosts + extra} in all", hosts(extra)
    if topology.hbm_bytes is None or topology.hbm_bytes >= UNLIMITED:
        return
    # Memory grows in steps of a quarter of the devices of a host.
    unit = max(on_devices // 4, 1)

    def dram(count: int) -> PlanTask:
        more = count * unit
        if topology.device == "cpu":
            return replace(task, topology=replace(topology, disk_bytes=(topology.disk_bytes or 0) + more))
        return replace(task, topology=replace(topology, host_bytes=(topology.host_bytes or 0) + more))

    _, held_anyway = fixed_bytes(WorkloadLoads(task.workload), topology.num_ranks, task.run or RunBytes())
    missing = num_bytes // topology.num_hosts - of_host + held_anyway * topology.devices_per_host
    count = _find_min_count_by_doubling(dram, max(missing // unit, 1))
    if count is not None:
        changed = dram(count)
        host_bytes, disk_bytes = changed.topology.host_bytes or 0, changed.topology.disk_bytes or 0
        text = f"give tables {format_bytes(host_bytes)} of DRAM on each host (host_bytes)"
        if topology.device == "cpu":
            text = f"store tables on {format_bytes(disk_bytes)} of disk on each host (disk_bytes; storage.dir of a run)"
        yield True, text, changed


def _find_min_count_by_doubling(change: Callable[[int], PlanTask], start: int) -> int | None:
    """Return the smallest count of at least `start` for which a plan exists, or `None`."""
    # Smaller counts cannot be sufficient, and large ones take long to try.
    count = start
    while count <= MAX_FACTOR * start and not is_feasible(change(count)):
        count *= 2
    if count == start or count > MAX_FACTOR * start:
        return count if count == start else None
    half = count // 2
    rest = _find_min_count(count - half, lambda extra: change(half + extra))
    return None if rest is None else half + rest


def _format_tables(tables: Sequence[TableSpec]) -> str:
    return join_names([repr(table.name) for table in tables], 3)
