"""Benchmarks of `meseta bench`: operators and training compared with other systems."""
