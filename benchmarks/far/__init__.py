"""Readers whose files lie behind links, for benchmarks/bench_scaling.py."""
