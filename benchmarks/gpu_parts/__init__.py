"""Checks of gpu_checks.py, which runs each in a separate process."""
