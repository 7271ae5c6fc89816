"""Measurements of a run that continues from another run on new rows."""
