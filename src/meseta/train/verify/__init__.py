"""Verification that a sharded run trains the same model as a single process.

The ranks call `record`. Afterwards one process calls `compare`, which repeats the steps.
"""

from meseta.train.verify.compare import Mismatch, Verification, compare
from meseta.train.verify.steps import record

__all__ = ["Mismatch", "Verification", "compare", "record"]
