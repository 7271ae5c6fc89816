"""Readers whose files are on another host, for bench_scaling.py."""
