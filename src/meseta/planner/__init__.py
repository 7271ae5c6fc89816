"""From tables and machines to a plan. No torch here."""

from meseta.planner.balanced import balanced_plan

__all__ = ["balanced_plan"]
