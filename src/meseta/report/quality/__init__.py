"""Comparison of configs over paired seeds: metrics, confidence intervals, and the page about a suite."""
