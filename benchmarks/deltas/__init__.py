"""The parts of benchmarks/bench_deltas.py."""
