"""Reference of the row cache in plain Python, one id at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meseta.ops.eviction import EvictionPolicy
from meseta.ops.row_cache import EMPTY


class ReferenceRowCache:
    """Slots and rows of a cache, without values."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.rows = torch.full((num_slots,), EMPTY)
        self.slots: dict[int, int] = {}
        """Slot of each cached row."""
        self.dirty_rows: set[int] = set()
        """Rows that differ from the backing store."""
        self._pins = torch.zeros(num_slots, dtype=torch.int32)
        self._policy = EvictionPolicy(num_slots, num_rows)

    def pin(self, ids: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Return (slot of each id, missing rows, evicted rows to write), or `None` if too many slots are pinned."""
        distinct = list(dict.fromkeys(ids))
        hits = [row for row in distinct if row in self.slots]
        missing = [row for row in distinct if row not in self.slots]
        pins = self._pins.clone()
        for row in hits:
            pins[self.slots[row]] += 1
        free = (
            self._policy.choose_victims(len(missing), self.rows, pins)
            if int((pins == 0).sum()) >= len(missing)
            else None
        )
        if free is None:
            return None
        leaving = [int(self.rows[slot]) for slot in free if self.rows[slot] != EMPTY]
        written = [row for row in leaving if row in self.dirty_rows]
        for row in leaving:
            del self.slots[row]
        for row, slot in zip(missing, free.tolist(), strict=True):
            self.slots[row], self.rows[slot] = slot, row
            pins[slot] = 1
        self._pins = pins
        self.dirty_rows -= set(leaving)
        if missing:
            self._policy.admit(free, torch.tensor(missing))
        rows = hits + missing
        slots = torch.tensor([self.slots[row] for row in rows], dtype=torch.int64)
        self._policy.touch(slots, torch.tensor(rows, dtype=torch.int64), len(ids))
        return [self.slots[row] for row in ids], missing, written

    def unpin(self, ids: Sequence[int]) -> None:
        """Undo one `pin`. The rows count as changed."""
        for row in set(ids):
            self._pins[self.slots[row]] -= 1
            self.dirty_rows.add(row)
