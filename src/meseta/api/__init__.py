"""Python interface of whole jobs: train, evaluate and predict with files, Arrow data or data frames."""

from meseta.api.callbacks import Callback
from meseta.api.fit import fit
from meseta.api.run import Run, open_run

__all__ = ["Callback", "Run", "fit", "open_run"]
