"""Reference of the slot map as a dict."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.sparse.shapes import Int


class ReferenceSlotMap:
    """Slot map in a dict, with the interface of `meseta.ops.slot_map.SlotMap`. Items are sorted by key."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        return torch.tensor([self._slots.get(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def insert(self, keys: Int[Tensor, " n"], slots: Int[Tensor, " n"]) -> int:
        before = len(self._slots)
        self._slots |= zip(keys.tolist(), slots.tolist(), strict=True)
        return len(self._slots) - before

    def remove(self, keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        return torch.tensor([self._slots.pop(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def items(self) -> tuple[Tensor, Tensor]:
        keys = torch.tensor(sorted(self._slots), dtype=torch.int64)
        return keys, self.find(keys)
