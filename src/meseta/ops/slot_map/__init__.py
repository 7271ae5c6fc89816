"""Map from 64-bit keys to slots, with batched operations."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.ops.core import core
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError

NOT_FOUND = -1
"""Returned for a key that is not in the map."""
MAX_UINT32_SLOT = 2**32 - 2
MAX_SLOT = 2**63 - 2


class SlotMap:
    """Hash table from keys to slots in host memory. Large batches use several threads.

    Results do not depend on the number of threads. Example:

        slot_map = SlotMap(1000)
        slot_map.insert(torch.tensor([7, -3]), torch.tensor([0, 1]))
        slot_map.find(torch.tensor([-3, 5]))    # [1, -1]
    """

    # Linear probing with entries ordered by hash (Amble and Knuth, "Ordered hash tables", The Computer Journal 1974).
    # An entry takes 12 bytes if slots are below 2^32, and at most 4/5 of the entries are occupied. Removed keys leave
    # no tombstones, so that the table does not degrade.

    def __init__(self, capacity: int, *, max_slot: int = MAX_UINT32_SLOT) -> None:
        """Create a growing map of `capacity` keys to slots 0..max_slot. Raises MesetaError if one is out of range."""
        if capacity < 0 or capacity > 2**48:
            raise MesetaError(f"slot map: capacity {capacity} is out of range; pass 0 to 2**48 keys")
        if not 0 <= max_slot <= MAX_SLOT:
            raise MesetaError(f"slot map: max_slot {max_slot} is out of range; pass 0 to 2**63 - 2")
        self.max_slot = max_slot
        self._table = core().slot_map(capacity, max_slot > MAX_UINT32_SLOT)

    def __len__(self) -> int:
        """Return the number of keys."""
        return int(core().slot_map_size(self._table))

    def num_bytes(self) -> int:
        """Return the memory of the map in bytes."""
        return int(core().slot_map_bytes(self._table))

    def find(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return the slot of each key, or NOT_FOUND."""
        keys, slots = _check_int64("keys", keys), torch.empty(keys.numel(), dtype=torch.int64)
        core().slot_map_find(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def insert(self, keys: Int[Tensor, " n"], slots: Int[Tensor, " m"]) -> int:
        """Insert keys with their slots. Returns the number of new keys.

        The last slot of a key replaces earlier ones. Raises MesetaError if a slot is outside 0..max_slot. Nothing is
        inserted then.
        """
        keys, slots = _check_int64("keys", keys), _check_int64("slots", slots)
        if keys.numel() != slots.numel():
            raise MesetaError(f"slot map: {keys.numel()} keys and {slots.numel()} slots; pass one slot per key")
        if slots.numel():
            low, high = slots.aminmax()
            if low < 0 or high > self.max_slot:
                raise MesetaError(f"slot map: slots are {int(low)}..{int(high)}, but must be in 0..{self.max_slot}")
        return int(core().slot_map_insert(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads()))

    def remove(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Remove keys. Returns the slot that each had, or NOT_FOUND. A repeated key has its slot only once."""
        keys, slots = _check_int64("keys", keys), torch.empty(keys.numel(), dtype=torch.int64)
        core().slot_map_remove(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def items(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Return all keys and their slots, in an order that depends on the keys only."""
        keys, slots = (torch.empty(len(self), dtype=torch.int64) for _ in range(2))
        count = int(core().slot_map_items(self._table, keys.numpy(), slots.numpy()))
        return keys[:count], slots[:count]


def _check_int64(name: str, numbers: Tensor) -> Tensor:
    if numbers.dim() != 1 or numbers.dtype != torch.int64 or numbers.device.type != "cpu":
        raise MesetaError(
            f"slot map: {name} are {numbers.dtype} {list(numbers.shape)} on {numbers.device}; pass int64 [n] on a CPU"
        )
    return numbers.contiguous()
