"""From a workload to the plan with the shortest predicted step."""

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
from meseta.planner.search.plan_result import PlanResult
from meseta.planner.search.problem import PlacementProblem, make_problem
from meseta.planner.search.refine import refine_by_prediction
from meseta.planner.search.search import search_assignments
from meseta.spec import CostModel, MesetaError, Plan, Topology, Workload
from meseta.spec.codecs import CrossHostAlgorithm, ExchangeAlgorithm
from meseta.spec.constraints import Constraints
from meseta.spec.tiers import Tier

MAX_COST_ERROR_RATIO = 0.02
"""How far the search's own cost of a plan may be from its prediction before the search is repeated."""


MAX_UNITS_TO_REPEAT = 300
"""Units of which a search is repeated, and made for each way between hosts."""
EXCHANGES: tuple[ExchangeAlgorithm, ...] = get_args(ExchangeAlgorithm)
DENSE_PATHS: tuple[CrossHostAlgorithm, ...] = get_args(CrossHostAlgorithm)


class DoesNotFitError(MesetaError):
    """No plan keeps to the room of the machines and to the constraints.

    The text says what is too much, and the cheapest changes after which a plan exists.
    """

    def __init__(self, certificate: str, fixes: Sequence[Fix]) -> None:
        ways_out = "; or ".join(f"{fix.description} ({1e3 * fix.step_s:.3g} ms a step)" for fix in fixes)
        super().__init__(certificate, remedy=ways_out or "use more or larger machines, or smaller tables")
        self.certificate = certificate
        """Which tables and bytes are too much."""
        self.fixes = tuple(fixes)
        """Changes of one kind each, the cheapest first."""


def make_plan(
    workload: Workload,
    topology: Topology,
    cost_model: CostModel | None = None,
    constraints: Constraints | None = None,
) -> Plan:
    """Choose a scheme, a tier and ranks for every table, so that the predicted step is as short as found.

    Ranks that several hosts share choose between both exchanges, see `meseta.spec.Plan`, unless `workload.comm` names
    one: under each a plan is searched; for many tables one for the flat one, which is held against both, unless it does
    not fit under the other.

    Searched are all sharding types; tiers beside 'hbm' where that is too small, or constraints ask for them. The best
    of several constructions, a beam search and local improvement is taken (`meseta.planner.search.search`). Where the
    cost model has networks, they judge the last few assignments and changes of them, which the constants alone have led
    to. The same input gives the same plan.

    Args:
        workload: tables, features, batch size, and what is known of the ids.
        topology: the machines; where `hbm_bytes` is given, no rank holds more in any phase of a run.
        cost_model: constants of the devices; None: as documented for their kind.
        constraints: what the plan has to keep to; None: nothing.

    Raises MesetaError for constraints that name what does not exist or contradict each other, and DoesNotFitError where
    nothing fits, which says what is too much and what to change.
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
    """`make_plan`, with the prediction, the runners-up and the bound beside the plan. `run` is what a run adds to the
    memory of its plan, `excluded_tiers` names tiers that it cannot train from."""
    task = PlanTask(
        workload=workload,
        topology=topology,
        cost_model=cost_model or documented_cost_model(topology.device),
        constraints=constraints or Constraints(),
        run=run,
        excluded_tiers=excluded_tiers,
    )
    task.constraints.check(workload.tables, topology)
    found = _find_best(task)
    if isinstance(found, PlanResult):
        return _with_cache_rows(found)
    raise DoesNotFitError(explain_infeasibility(found), find_fixes(task, _predicted_step_s))


def _with_cache_rows(found: PlanResult) -> PlanResult:
    """With the room that is left on each rank shared out among its rows that lie near and far."""
    problem = found.problem
    machines = problem.topology, problem.cost_model
    plan = reallocate_cache_rows(found.plan, problem.loads, *machines, problem.run)
    if plan == found.plan:
        return found
    prediction = predict(plan, problem.workload, *machines, loads=problem.loads, run=problem.run)
    return replace(found, plan=plan, prediction=prediction)


def _predicted_step_s(task: PlanTask) -> float | None:
    found = _find_best(task)
    return _with_cache_rows(found).prediction.step_s if isinstance(found, PlanResult) else None


def choose_exchange_algorithms(
    plan: Plan, workload: Workload, topology: Topology, cost_model: CostModel | None = None, run: RunBytes | None = None
) -> Plan:
    """A given plan with the ways between hosts that `workload.comm` asks for; for 'auto' those that it has, else those
    with the shorter predicted step. As it is where ranks of several hosts do not share them."""
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
    """The best plan; where nothing fits, the problem that was searched last."""
    comm, loads = task.workload.comm, WorkloadLoads(task.workload)
    if not 1 < task.topology.devices_per_host < task.topology.num_ranks:
        first = _search(task, loads, (None, None))
        return first if isinstance(first, PlacementProblem) else first.repeat_search()
    path: CrossHostAlgorithm = "cross_host" if comm.dense_exchange == "auto" else comm.dense_exchange
    options: list[AlgorithmPair] = [("flat", None), ("hierarchical", path)]
    if comm.exchange != "auto":
        options = [ways for ways in options if ways[0] == comm.exchange]
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
    """What one search found."""

    plan_result: PlanResult
    rebuild_problem: Callable[..., PlacementProblem]
    """The problem, with other prices."""

    @property
    def step_s(self) -> float:
        """Predicted."""
        return self.plan_result.prediction.step_s

    def repeat_search(self) -> PlanResult:
        """Searched once more, where that may help."""
        return _repeat_search(self.plan_result, self.rebuild_problem)

    def with_algorithms(self, ways: AlgorithmPair) -> _SearchResult | None:
        """The same pieces on the same ranks with other ways between hosts, where that is predicted to take less; else
        this. None where it would take less and does not fit."""
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
        if None in choice:  # other ways have other options: a table that has lost its own stays as it is
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
    """By unit: the option of another problem with the scheme that an assignment has chosen, else the one that keeps its
    pieces; None where there is neither."""
    numbers = {key: number for number, key in enumerate(zip(changed.options.unit_index, changed.schemes, strict=True))}
    chosen = (problem.schemes[int(option)] for option in assignment.option)
    return [numbers.get((unit, scheme), numbers.get((unit, None))) for unit, scheme in enumerate(chosen)]


def _search(
    task: PlanTask, loads: WorkloadLoads, ways: AlgorithmPair, than_s: float = math.inf
) -> _SearchResult | PlacementProblem:
    """The best plan with these ways between hosts; where nothing fits, or no plan can take less than `than_s`, the
    problem that was searched last."""
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
            # What networks correct, the bound does not know.
            if than_s < math.inf and task.cost_model.neural is None and lower_bound(problem).step_s >= than_s:
                is_hopeless = True
                continue
            found = _select_best_plan(problem)
            if found is not None:
                return _SearchResult(found, make)
        if is_hopeless or not kept:
            return problem
        kept = release_one_table(kept, workload.tables, int(problem.cluster.rank_capacity[0, 0]))


def _repeat_search(found: PlanResult, make: Callable[..., PlacementProblem]) -> PlanResult:
    """Search once more with the cache of the busiest rank, where that is another one than an average rank has."""
    expected_s = found.assignment.cost + found.problem.fixed_s
    if len(found.problem.units) > MAX_UNITS_TO_REPEAT:
        return found
    if abs(found.constants_step_s - expected_s) <= MAX_COST_ERROR_RATIO * expected_s:
        return found
    problem = found.problem
    placement = Placement.from_plan(found.plan, problem.loads, problem.topology.devices_per_host)
    cache_bytes = problem.cost_model.cache.cache_bytes
    held = problem.loads.hardware_cached_samples(placement.sharded, placement.owner, placement.num_ranks, cache_bytes)
    held_samples = float(held[found.prediction.bottleneck])
    prices = ShardCostEstimator(
        problem.loads, problem.topology, problem.cost_model, held_samples, problem.run, problem.algorithms
    )
    other = _select_best_plan(make(estimator=prices))
    return other if other is not None and other.prediction.step_s < found.prediction.step_s else found


def _select_best_plan(problem: PlacementProblem) -> PlanResult | None:
    """The assignment whose plan is predicted to take least, of those that the search found; where networks correct the
    constants, of those that it becomes by changes that shorten the prediction, too."""
    best = None
    for candidate in search_assignments(problem):
        assignment, origin = candidate.assignment, candidate.origin
        if problem.cost_model.neural is None:
            prediction = _predict_assignment(problem, assignment)
        else:
            assignment, prediction = refine_by_prediction(assignment, partial(_predict_assignment, problem))
            origin = origin if assignment is candidate.assignment else f"{origin}, changed as the networks say"
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
