"""The parts of benchmarks/bench_quality.py."""
