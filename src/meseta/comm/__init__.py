"""Every collective of the package. Code elsewhere asks a `World`; it never calls torch.distributed."""

from meseta.comm.batch_slice import BatchSlice, Totals
from meseta.comm.dense import DenseGradients
from meseta.comm.messages import abandon
from meseta.comm.world import Pending, Scope, World

__all__ = ["BatchSlice", "DenseGradients", "Pending", "Scope", "Totals", "World", "abandon"]
