"""Checks of gpu_checks.py, each in a process of its own."""
