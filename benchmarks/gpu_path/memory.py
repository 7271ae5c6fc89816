"""Sets of storages, which mark memory of an emulated device and pinned memory."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MIN_REFERENCES = 4096
"""Number of storages above which references to freed ones are dropped."""


class StorageSet:
    """Thread-safe set of the storages of tensors, in the order in which they were added. It keeps no storage alive."""

    def __init__(self) -> None:
        # A weak reference prevents that a later storage gets the same key.
        self._members: dict[int, tuple[StorageWeakRef, int]] = {}
        self._limit, self._num_added = MIN_REFERENCES, 0
        self._lock = Lock()

    def __contains__(self, tensor: Tensor) -> bool:
        return self.number(tensor) is not None

    def number(self, tensor: Tensor) -> int | None:
        """Return how many storages were added before that of `tensor`, or `None` if it is not a member."""
        if not self._members:
            return None
        member = self._members.get(tensor.untyped_storage()._cdata)
        return None if member is None else member[1]

    def add(self, tensor: Tensor) -> None:
        """Add the storage of a tensor, unless it is a member."""
        with self._lock:
            if tensor in self:
                return
            reference = StorageWeakRef(tensor.untyped_storage())
            self._members[reference.cdata] = reference, self._num_added
            self._num_added += 1
            if len(self._members) > self._limit:
                self._members = {key: member for key, member in self._members.items() if not member[0].expired()}
                self._limit = max(MIN_REFERENCES, 2 * len(self._members))

    def clear(self) -> None:
        """Remove all storages."""
        self._members.clear()
        self._num_added = 0


def has_storage(value: object) -> bool:
    """Whether `value` is a dense tensor."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
