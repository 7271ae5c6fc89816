"""Models that lead published comparisons of interactions, and DHEN."""
