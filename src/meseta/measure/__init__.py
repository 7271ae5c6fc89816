"""Measurements on this machine: diagnosis, timing of benchmarks, and calibration of the cost model."""
