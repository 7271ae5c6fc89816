"""Parts of benchmarks/bench_daily.py."""
