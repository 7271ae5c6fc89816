"""A plan with all that it was chosen by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.search.assignment import Assignment
from meseta.planner.search.bound import Bound, lower_bound
from meseta.planner.search.problem import Problem
from meseta.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with what it was chosen by."""

    plan: Plan
    prediction: Prediction
    problem: Problem
    assignment: Assignment
    """The plan as the search saw it."""
    origin: str
    """Which part of the search found it."""

    @cached_property
    def bound(self) -> Bound:
        """Seconds below which no plan of the same schemes goes."""
        return lower_bound(self.problem)

    @cached_property
    def priced_s(self) -> float:
        """Seconds of a step by the constants alone, which the bound holds for: the prediction's, unless networks of the
        cost model correct them."""
        if self.problem.cost_model.neural is None:
            return self.prediction.step_s
        return _priced(self.plan, self.problem).step_s


def _priced(plan: Plan, problem: Problem) -> Prediction:
    """By the constants alone."""
    constants = replace(problem.cost_model, neural=None)
    return predict(plan, problem.workload, problem.topology, constants, loads=problem.loads, run=problem.run)
