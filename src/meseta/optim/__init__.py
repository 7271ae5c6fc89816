"""Row optimizers, dense optimizers and learning-rate schedules."""

from meseta.optim.row.make import make_row_optimizer

__all__ = ["make_row_optimizer"]
