"""From an OptimizerSpec to the record that runs."""

from __future__ import annotations

from functools import cache

from meseta.ops.row_optimizer import RowOptimizer
from meseta.optim.row.adagrad import adagrad, rowwise_adagrad
from meseta.optim.row.adam import adam
from meseta.optim.row.sgd import sgd
from meseta.spec import OptimizerSpec

FACTORIES = {"sgd": sgd, "adagrad": adagrad, "rowwise_adagrad": rowwise_adagrad, "adam": adam}


@cache
def make_row_optimizer(spec: OptimizerSpec) -> RowOptimizer:
    """The record for a spec; equal specs share one, so it is traced once for all tables."""
    return FACTORIES[spec.name](spec)
