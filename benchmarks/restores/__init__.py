"""Parts of bench_quality.py."""
