"""Comparison of Meseta with other systems in one run: embedding operators, and training of a DLRM."""
