"""Preparation of a run: specifications, memory check, plan, model and readers."""
