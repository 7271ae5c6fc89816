"""Parts of bench_checkpoint.py."""
