"""Batches whose rows other processes decode."""
