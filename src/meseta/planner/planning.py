"""Search for the plan with the shortest predicted step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np

from meseta.planner.cost.documented import documented_cost_model
from meseta.planner.cost.loads import WorkloadLoads
from meseta.planner.cost.memory import RunBytes
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.explain.fixes import Fix, PlanTask, explain_infeasibility, find_fixes
from meseta.planner.search.assignment import Assignment
from meseta.planner.search.bound import lower_bound
from meseta.planner.search.cache_allocation import reallocate_cache_rows
from meseta.planner.search.cost_estimator import AlgorithmPair, ShardCostEstimator
from meseta.planner.search.kept_tables import load_kept_tables, release_one_table
from meseta.planner.search.problem import PlacementProblem, make_problem
from meseta.planner.search.refine import refine_by_prediction
from meseta.planner.search.search import PlanResult, search_assignments
from meseta.spec import CostModel, MesetaError, Plan, Topology, Workload
from meseta.spec.codecs import CrossHostAlgorithm, ExchangeAlgorithm
from meseta.spec.constraints import Constraints
from meseta.spec.tiers import Tier

MAX_COST_ERROR_RATIO = 0.02
"""Maximum relative difference between the cost in the search and the prediction, above which the search is repeated."""


MAX_UNITS_TO_REPEAT = 300
"""Maximum number of units for which a search is repeated, and run for each exchange algorithm."""
EXCHANGES: tuple[ExchangeAlgorithm, ...] = get_args(ExchangeAlgorithm)
DENSE_PATHS: tuple[CrossHostAlgorithm, ...] = get_args(CrossHostAlgorithm)


class DoesNotFitError(MesetaError):
    """No plan satisfies the memory limits and constraints. The message suggests changes with their predicted step."""

    def __init__(self, certificate: str, fixes: Sequence[Fix]) -> None:
        ways_out = "; or ".join(f"{fix.description} ({1e3 * fix.step_s:.3g} ms a step)" for fix in fixes)
        super().__init__(certificate, remedy=ways_out or "use more or larger machines, or smaller tables")
        self.certificate = certificate
        """Reason: tables and bytes that exceed the limits."""
        self.fixes = tuple(fixes)
        """Changes, each of which makes a plan possible. Changes of the topology are last."""


def make_plan(
    workload: Workload,
    topology: Topology,
    cost_model: CostModel | None = None,
    constraints: Constraints | None = None,
) -> Plan:
    """Return the plan with the shortest predicted step that the search finds.

    The same input gives the same plan. With several ranks on each of several hosts, the plan also chooses the exchange
    algorithms, unless `workload.comm` specifies them. Tiers other than `hbm` are used only if `hbm` is too small, or if
    constraints ask for them.

    Raises MesetaError if constraints are invalid or contradict each other, and DoesNotFitError if no plan fits.

    Args:
        workload: Tables, features and batch size.
        topology: Hosts and devices. No rank exceeds `hbm_bytes` in any phase of a run, if it is set.
        cost_model: Constants and networks. `None` uses the documented constants of the device.
        constraints: Constraints of the plan. `None` means no constraints.
    """
    return find_plan(workload, topology, cost_model, constraints).plan


def find_plan(
    workload: Workload,
    topology: Topology,
    cost_model: CostModel | None = None,
    constraints: Constraints | None = None,
    run: RunBytes | None = None,
    excluded_tiers: tuple[Tier, ...] = (),
) -> PlanResult:
    """Find a plan as `make_plan` does, and return it with its prediction and search problem.

    `run` is the memory that a run needs in addition to its plan. `excluded_tiers` are tiers that the run cannot use.
    """
    task = PlanTask(
        workload=workload,
        topology=topology,
        cost_model=cost_model or documented_cost_model(topology.device),
        constraints=constraints or Constraints(),
        run=run,
        excluded_tiers=excluded_tiers,
    )
    task.constraints.check(workload.tables, topology)
    result = _find_best(task)
    if isinstance(result, PlanResult):
        return _with_cache_rows(result)
    raise DoesNotFitError(explain_infeasibility(result), find_fixes(task, _predicted_step_s))


def _with_cache_rows(result: PlanResult) -> PlanResult:
    """Return the result with caches that use the remaining memory of each rank."""
    problem = result.problem
    machines = problem.topology, problem.cost_model
    plan = reallocate_cache_rows(result.plan, problem.loads, *machines, problem.run)
    if plan == result.plan:
        return result
    prediction = predict(plan, problem.workload, *machines, loads=problem.loads, run=problem.run)
    return replace(result, plan=plan, prediction=prediction)


def _predicted_step_s(task: PlanTask) -> float | None:
    result = _find_best(task)
    return _with_cache_rows(result).prediction.step_s if isinstance(result, PlanResult) else None


def choose_exchange_algorithms(
    plan: Plan, workload: Workload, topology: Topology, cost_model: CostModel | None = None, run: RunBytes | None = None
) -> Plan:
    """Return the plan with exchange algorithms between hosts.

    Algorithms are those of `workload.comm`. If that is `auto`, they are those of the plan, or else the ones with the
    shortest predicted step. The plan is unchanged on a single host, and with one rank per host.
    """
    comm, per_host = workload.comm, topology.devices_per_host
    if not 1 < per_host < topology.num_ranks:
        return plan
    asked = comm.exchange if comm.exchange != "auto" else plan.exchange
    sums = comm.dense_exchange if comm.dense_exchange != "auto" else plan.dense_exchange
    if not comm.codec("dense").is_lossless:
        sums = sums or "cross_host"
    exchanges: Sequence[ExchangeAlgorithm] = EXCHANGES if asked is None else (asked,)
    options: list[AlgorithmPair] = []
    for exchange in exchanges:
        paths: Sequence[CrossHostAlgorithm] = DENSE_PATHS if sums is None else (sums,)
        options += [(exchange, None)] if exchange == "flat" else [(exchange, path) for path in paths]
    plans = [replace(plan, exchange=exchange, dense_exchange=path) for exchange, path in options]
    if len(plans) == 1:
        return plans[0]
    loads = WorkloadLoads(workload)
    steps = [predict(one, workload, topology, cost_model, loads=loads, run=run).step_s for one in plans]
    return plans[steps.index(min(steps))]


def _find_best(task: PlanTask) -> PlanResult | PlacementProblem:
    comm, loads = task.workload.comm, WorkloadLoads(task.workload)
    if not 1 < task.topology.devices_per_host < task.topology.num_ranks:
        first = _search(task, loads, (None, None))
        return first if isinstance(first, PlacementProblem) else first.repeat_search()
    path: CrossHostAlgorithm = "cross_host" if comm.dense_exchange == "auto" else comm.dense_exchange
    options: list[AlgorithmPair] = [("flat", None), ("hierarchical", path)]
    if comm.exchange != "auto":
        options = [ways for ways in options if ways[0] == comm.exchange]
    # A plan is searched for each exchange algorithm. For many tables, only the first one is searched, and its placement
    # is also predicted with the second algorithm.
    first = _search(task, loads, options[0])
    if len(options) == 1 or isinstance(first, PlacementProblem):
        best = first if len(options) == 1 else _search(task, loads, options[1])
    else:
        same_pieces = first.with_algorithms(options[1])
        best = same_pieces or first
        if same_pieces is None or len(first.plan_result.problem.units) <= MAX_UNITS_TO_REPEAT:
            second = _search(task, loads, options[1], best.step_s)
            best = second if isinstance(second, _SearchResult) and second.step_s < best.step_s else best
    if isinstance(best, PlacementProblem):
        return best
    if (
        best.plan_result.plan.exchange == "hierarchical"
        and comm.dense_exchange == "auto"
        and comm.codec("dense").is_lossless
    ):
        best = best.with_algorithms(("hierarchical", "chain")) or best
    return best.repeat_search()


@dataclass(frozen=True)
class _SearchResult:
    """Result of one search."""

    plan_result: PlanResult
    rebuild_problem: Callable[..., PlacementProblem]
    """Function that creates the search problem again with changed arguments."""

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return self.plan_result.prediction.step_s

    def repeat_search(self) -> PlanResult:
        return _repeat_search(self.plan_result, self.rebuild_problem)

    def with_algorithms(self, ways: AlgorithmPair) -> _SearchResult | None:
        """Return the same placement with other exchange algorithms if its predicted step is shorter, otherwise this
        result.

        Returns `None` if it would be shorter, but does not fit.
        """
        planned, problem = self.plan_result, self.plan_result.problem
        plan = replace(planned.plan, exchange=ways[0], dense_exchange=ways[1])
        prediction = predict(
            plan, problem.workload, problem.topology, problem.cost_model, loads=problem.loads, run=problem.run
        )
        if prediction.step_s >= self.step_s:
            return self
        before = planned.assignment
        prices = ShardCostEstimator(problem.loads, problem.topology, problem.cost_model, None, problem.run, ways)
        changed = self.rebuild_problem(estimator=prices)
        choice = _match_options(changed, problem, before)
        if None in choice:  # Options depend on the algorithms. Tables without a matching option keep their placement.
            lost = [i for unit, option in enumerate(choice) if option is None for i in problem.units[unit]]
            entries = {problem.workload.tables[i].name: planned.plan.tables[i] for i in lost}
            changed = self.rebuild_problem(estimator=prices, kept_tables={**problem.kept_tables, **entries})
            choice = _match_options(changed, problem, before)
        options = [option for option in choice if option is not None]
        assignment = Assignment(changed.options, changed.cluster, np.array(options, np.int64))
        for unit, option in enumerate(options):
            assignment.place(option, before.ranks[unit])
        if not assignment.fits():
            return None
        plan = changed.to_plan(assignment)
        planned = replace(planned, plan=plan, prediction=prediction, problem=changed, assignment=assignment)
        return _SearchResult(planned, self.rebuild_problem)


def _match_options(changed: PlacementProblem, problem: PlacementProblem, assignment: Assignment) -> list[int | None]:
    """Return the option of each unit in `changed` with the scheme that the assignment chose, or that keeps its
    placement. `None` if there is neither."""
    numbers = {key: number for number, key in enumerate(zip(changed.options.unit_index, changed.schemes, strict=True))}
    chosen = (problem.schemes[int(option)] for option in assignment.option)
    return [numbers.get((unit, scheme), numbers.get((unit, None))) for unit, scheme in enumerate(chosen)]


def _search(
    task: PlanTask, loads: WorkloadLoads, ways: AlgorithmPair, than_s: float = math.inf
) -> _SearchResult | PlacementProblem:
    """Return the best plan with these exchange algorithms, or the last search problem if no plan fits or can be faster
    than `than_s`."""
    workload, topology, constraints = task.workload, task.topology, task.constraints
    kept = {} if constraints.keep is None else load_kept_tables(constraints.keep, workload.tables, topology)
    while True:
        is_hopeless = False
        for tiers in task.tier_sets:
            make = partial(
                make_problem,
                workload,
                topology,
                task.cost_model,
                constraints,
                tiers=tiers,
                kept_tables=kept,
                estimator=ShardCostEstimator(loads, topology, task.cost_model, None, task.run, ways),
            )
            problem = make()
            # The bound does not apply to the predictions of networks.
            if than_s < math.inf and task.cost_model.neural is None and lower_bound(problem).step_s >= than_s:
                is_hopeless = True
                continue
            result = _select_best_plan(problem)
            if result is not None:
                return _SearchResult(result, make)
        if is_hopeless or not kept:
            return problem
        # Without a plan that fits, one more table may move.
        kept = release_one_table(kept, workload.tables, int(problem.cluster.rank_capacity[0, 0]))


def _repeat_search(result: PlanResult, make: Callable[..., PlacementProblem]) -> PlanResult:
    """Search again with the hardware cache of the busiest rank, if the prediction differs from the cost in the
    search."""
    # The search assumes the hardware cache of an average rank.
    expected_s = result.assignment.cost + result.problem.fixed_s
    if len(result.problem.units) > MAX_UNITS_TO_REPEAT:
        return result
    if abs(result.constants_step_s - expected_s) <= MAX_COST_ERROR_RATIO * expected_s:
        return result
    problem = result.problem
    placement = Placement.from_plan(result.plan, problem.loads, problem.topology.devices_per_host)
    cache_bytes = problem.cost_model.cache.cache_bytes
    held = problem.loads.hardware_cached_samples(placement.sharded, placement.owner, placement.num_ranks, cache_bytes)
    held_samples = float(held[result.prediction.bottleneck])
    prices = ShardCostEstimator(
        problem.loads, problem.topology, problem.cost_model, held_samples, problem.run, problem.algorithms
    )
    other = _select_best_plan(make(estimator=prices))
    return other if other is not None and other.prediction.step_s < result.prediction.step_s else result


def _select_best_plan(problem: PlacementProblem) -> PlanResult | None:
    """Return the assignment of the search with the shortest predicted step. If networks correct the constants,
    assignments are refined before."""
    best = None
    for candidate in search_assignments(problem):
        assignment, origin = candidate.assignment, candidate.origin
        if problem.cost_model.neural is None:
            prediction = _predict_assignment(problem, assignment)
        else:
            assignment, prediction = refine_by_prediction(assignment, partial(_predict_assignment, problem))
            origin = origin if assignment is candidate.assignment else f"{origin}, refined by networks"
        if best is None or prediction.step_s < best.prediction.step_s:
            best = PlanResult(
                plan=problem.to_plan(assignment),
                prediction=prediction,
                problem=problem,
                assignment=assignment,
                origin=origin,
            )
    if best is not None:
        best.plan.check(problem.workload.tables)
    return best


def _predict_assignment(problem: PlacementProblem, assignment: Assignment) -> Prediction:
    plan = problem.to_plan(assignment)
    return predict(plan, problem.workload, problem.topology, problem.cost_model, loads=problem.loads, run=problem.run)
