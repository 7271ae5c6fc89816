"""Comparison of two source trees that may differ only in names, docstrings, comments and messages."""
