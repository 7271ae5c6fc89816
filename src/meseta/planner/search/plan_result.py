"""Result of planning: a plan with its prediction and search problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.search.assignment import Assignment
from meseta.planner.search.bound import LowerBound, lower_bound
from meseta.planner.search.problem import PlacementProblem
from meseta.spec import Plan


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Plan with its prediction and search problem."""

    plan: Plan
    prediction: Prediction
    problem: PlacementProblem
    assignment: Assignment
    """Assignment of the search that the plan was made from."""
    origin: str
    """Part of the search that found the plan."""

    @cached_property
    def bound(self) -> LowerBound:
        """Lower bound of all plans with the same sharding schemes."""
        return lower_bound(self.problem)

    @cached_property
    def constants_step_s(self) -> float:
        """Seconds per step predicted by the constants alone. The lower bound applies to them, and not to predictions of
        networks."""
        if self.problem.cost_model.neural is None:
            return self.prediction.step_s
        return _predict_with_constants(self.plan, self.problem).step_s


def _predict_with_constants(plan: Plan, problem: PlacementProblem) -> Prediction:
    constants = replace(problem.cost_model, neural=None)
    return predict(plan, problem.workload, problem.topology, constants, loads=problem.loads, run=problem.run)
