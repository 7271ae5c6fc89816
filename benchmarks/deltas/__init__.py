"""Parts of bench_deltas.py."""
