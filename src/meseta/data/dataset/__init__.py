"""Prepared datasets: description in dataset.json, rules for values, statistics and checks of the files."""
