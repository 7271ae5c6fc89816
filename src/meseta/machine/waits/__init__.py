"""Waits of threads for storage: what a process does, and the system calls in which the kernel holds it."""
