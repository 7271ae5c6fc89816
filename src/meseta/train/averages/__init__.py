"""Averages of models and of their predictions."""
