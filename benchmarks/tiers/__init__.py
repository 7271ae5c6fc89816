"""Parts of bench_tiers.py."""
