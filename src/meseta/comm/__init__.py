"""Collective communication. Other packages use `World` and never call torch.distributed."""

from meseta.comm.dense import DenseGradients
from meseta.comm.messages import retain_until_exit
from meseta.comm.world import BatchSlice, BatchTotals, ExchangeScope, PendingCollective, World

__all__ = [
    "BatchSlice",
    "BatchTotals",
    "DenseGradients",
    "ExchangeScope",
    "PendingCollective",
    "World",
    "retain_until_exit",
]
