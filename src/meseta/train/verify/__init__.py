"""Verification that a sharded run trains like one process: ranks `record` steps, which `compare` then repeats."""

from meseta.train.verify.compare import Mismatch, Verification, compare
from meseta.train.verify.steps import record

__all__ = ["Mismatch", "Verification", "compare", "record"]
