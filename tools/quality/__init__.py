"""Comparison of configs over worlds, datasets and seeds, with confidence intervals. See docs/quality.md."""
