"""Whether ranks train the model that one process trains: `record` on the ranks, then `compare` in one process."""

from meseta.train.verify.compare import Verification, compare
from meseta.train.verify.rules import Mismatch
from meseta.train.verify.steps import record

__all__ = ["Mismatch", "Verification", "compare", "record"]
