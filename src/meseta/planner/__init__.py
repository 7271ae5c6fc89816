"""From tables and machines to a plan, and what a plan will cost. No torch here."""

from meseta.planner.cost.documented import documented_cost_model
from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.planning import DoesNotFitError, Planned, choose_ways, find_plan, make_plan
from meseta.spec.stages import COMPONENTS

__all__ = [
    "COMPONENTS",
    "DoesNotFitError",
    "Planned",
    "Prediction",
    "choose_ways",
    "documented_cost_model",
    "find_plan",
    "make_plan",
    "predict",
]
