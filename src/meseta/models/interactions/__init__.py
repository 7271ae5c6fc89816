"""Models with explicit feature interactions that lead published comparisons, and DHEN."""
