"""Trainer, metrics, verification and the report of a run."""
