"""Explanations of plans: alternatives, differences between plans, and fixes if no plan fits."""
