"""Planner that chooses a sharding plan for a workload and predicts its time and memory. Does not need torch."""

from meseta.planner.cost.documented import documented_cost_model
from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.planning import DoesNotFitError, PlanResult, choose_exchange_algorithms, find_plan, make_plan
from meseta.spec.stages import STEP_COMPONENTS

__all__ = [
    "STEP_COMPONENTS",
    "DoesNotFitError",
    "PlanResult",
    "Prediction",
    "choose_exchange_algorithms",
    "documented_cost_model",
    "find_plan",
    "make_plan",
    "predict",
]
