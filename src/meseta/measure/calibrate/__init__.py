"""Measuring what operators, collectives and matrix products cost here, and fitting a cost model to it."""
