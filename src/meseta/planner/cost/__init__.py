"""Predictions of the time of a training step and of the memory of each rank, from a cost model."""
