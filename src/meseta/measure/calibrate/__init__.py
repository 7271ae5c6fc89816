"""Calibration: measures operators, collectives and matrix products on this machine and fits a cost model to them."""
