"""Waits of threads for storage: current activities of a process, and blocked system calls."""
