"""Parts of bench_readers.py."""
