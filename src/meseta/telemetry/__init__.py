"""Measured times, metrics and other records of a run. Importing it does not import torch."""
