"""A map from 64-bit keys to slots, found, put and removed by the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.core import core
from meseta.spec import MesetaError

NOT_FOUND = -1
"""Slot of a key that is not there."""
MAX_UINT32_SLOT = 2**32 - 2
MAX_SLOT = 2**63 - 2


class SlotMap:
    """Slots of keys, in the memory of the host; on several threads where a batch is worth it.

    A hash table by linear probing whose entries are in the order of their hashes (Amble and Knuth, "Ordered hash
    tables", The Computer Journal 1974): 12 bytes a place with slots below 2^32, at most 4/5 of the places taken. A
    removal leaves no mark, so that a directory never wears out, and nothing depends on the number of threads.

        directory = Directory(1000)
        directory.insert(torch.tensor([7, -3]), torch.tensor([0, 1]))
        directory.find(torch.tensor([-3, 5]))    # [1, -1]
    """

    def __init__(self, capacity: int, *, max_slot: int = MAX_UINT32_SLOT) -> None:
        """Room for `capacity` keys, which grows where more come; slots are 0..max_slot. Raises MesetaError for a
        capacity or slots that cannot be."""
        if capacity < 0 or capacity > 2**48:
            raise MesetaError(f"directory: room for {capacity} keys cannot be made; give a number from 0 to 2**48")
        if not 0 <= max_slot <= MAX_SLOT:
            raise MesetaError(f"directory: slots up to {max_slot} cannot be kept; give a number from 0 to 2**63 - 2")
        self.max_slot = max_slot
        self._table = core().slot_map(capacity, max_slot > MAX_UINT32_SLOT)

    def __len__(self) -> int:
        """Keys that are there."""
        return int(core().slot_map_size(self._table))

    def num_bytes(self) -> int:
        """Of memory."""
        return int(core().slot_map_bytes(self._table))

    def find(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The slot of each key; ABSENT for those that are not there."""
        keys, slots = _check_int64("keys", keys), torch.empty(keys.numel(), dtype=torch.int64)
        core().slot_map_find(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def insert(self, keys: Int[Tensor, " n"], slots: Int[Tensor, " m"]) -> int:
        """Put keys with their slots; of a key that is there, or comes twice, the last slot counts. Returns how many are
        new. Raises MesetaError for slots outside 0..max_slot, and puts none then."""
        keys, slots = _check_int64("keys", keys), _check_int64("slots", slots)
        if keys.numel() != slots.numel():
            raise MesetaError(f"directory: {keys.numel()} keys and {slots.numel()} slots; give one for each key")
        if slots.numel():
            low, high = slots.aminmax()
            if low < 0 or high > self.max_slot:
                raise MesetaError(f"directory: slots are {int(low)}..{int(high)}; they must lie in 0..{self.max_slot}")
        return int(core().slot_map_insert(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads()))

    def remove(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Take keys out; returns the slot that each had, ABSENT for one that was not there, or was taken out before in
        the same batch."""
        keys, slots = _check_int64("keys", keys), torch.empty(keys.numel(), dtype=torch.int64)
        core().slot_map_remove(self._table, keys.numpy(), slots.numpy(), torch.get_num_threads())
        return slots

    def items(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """All keys and their slots, in an order that follows from the keys alone."""
        keys, slots = (torch.empty(len(self), dtype=torch.int64) for _ in range(2))
        count = int(core().slot_map_items(self._table, keys.numpy(), slots.numpy()))
        return keys[:count], slots[:count]


def _check_int64(name: str, numbers: Tensor) -> Tensor:
    if numbers.dim() != 1 or numbers.dtype != torch.int64 or numbers.device.type != "cpu":
        raise MesetaError(
            f"directory: {name} are {numbers.dtype} {list(numbers.shape)} on {numbers.device}; give int64 [n] on a CPU"
        )
    return numbers.contiguous()
