"""A plan with all that it was chosen by."""

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
    """A plan with what it was chosen by."""

    plan: Plan
    prediction: Prediction
    problem: PlacementProblem
    assignment: Assignment
    """The plan as the search saw it."""
    origin: str
    """Which part of the search found it."""

    @cached_property
    def bound(self) -> LowerBound:
        """Seconds below which no plan of the same schemes goes."""
        return lower_bound(self.problem)

    @cached_property
    def constants_step_s(self) -> float:
        """Seconds of a step by the constants alone, which the bound holds for: the prediction's, unless networks of the
        cost model correct them."""
        if self.problem.cost_model.neural is None:
            return self.prediction.step_s
        return _predict_with_constants(self.plan, self.problem).step_s


def _predict_with_constants(plan: Plan, problem: PlacementProblem) -> Prediction:
    """By the constants alone."""
    constants = replace(problem.cost_model, neural=None)
    return predict(plan, problem.workload, problem.topology, constants, loads=problem.loads, run=problem.run)
