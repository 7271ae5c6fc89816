"""Measurements on this machine: diagnosis, benchmarks against other systems, and calibration of the cost model."""
