"""Readers of prepared datasets: row order, decoding, and slicing into batches."""
