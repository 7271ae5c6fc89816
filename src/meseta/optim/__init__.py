"""Row optimizers, dense optimizers and learning-rate schedules."""

from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, element_state, row_state, where
from meseta.optim.dense import make_dense_optimizer
from meseta.optim.row.make import make_row_optimizer

__all__ = ["Hyper", "RowOptimizer", "element_state", "make_dense_optimizer", "make_row_optimizer", "row_state", "where"]
