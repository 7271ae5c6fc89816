"""Which rows lie near, and where: slots, who needs them, and which are given to other rows next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.directory import Directory
from meseta.ops.eviction import EvictionPolicy
from meseta.ops.unique import unique

EMPTY = -1
"""Row of a slot that has none."""


@dataclass(eq=False)
class Pinned:
    """Rows that a batch under way needs; they stay in their slots until it is over."""

    rows: Int[Tensor, " U"]
    """Each once, ascending."""
    slots: Int[Tensor, " U"]
    """Where each lies."""
    inverse: Int[Tensor, " n"]
    """Which of them each row is that was asked for."""
    finish: Callable[[], None] | None = None
    """Waits for those that are on their way, and puts them into their slots; None: all are there."""
    after: tuple[Pinned, ...] = ()
    """Those who brought rows before that are on their way still."""

    def wait(self) -> None:
        """Until all rows are in their slots. Raises MesetaError where they cannot be had."""
        earlier, self.after = self.after, ()
        for pinned in earlier:
            pinned.wait()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    @property
    def places(self) -> Int[Tensor, " n"]:
        """The slot of each row that was asked for."""
        return self.slots[self.inverse]


class NearSlots:
    """Slots 0..num_slots-1 hold the rows that lie near; those behind hold rows that are read and nothing else, as an
    evaluation does, for as long as it needs them.

    Which row leaves is told by meseta.ops.eviction: one that was asked for least, of late.
    """

    def __init__(self, num_slots: int, num_to_read: int, num_rows: int) -> None:
        """Of a shard of `num_rows` rows."""
        self.num_slots = num_slots
        rows = np.zeros(num_slots + num_to_read, np.int64)  # pages that nobody writes to take no memory
        rows[:num_slots] = EMPTY
        self.rows: Int[Tensor, " slots"] = torch.from_numpy(rows)
        """Of each slot; EMPTY: none. Of slots that are read alone it means nothing."""
        self.is_dirty = torch.zeros(num_slots, dtype=torch.bool)
        """Whether the far side has older values, of each slot."""
        self._num_pins = torch.zeros(num_slots, dtype=torch.int32)
        self._policy = EvictionPolicy(num_slots, num_rows)
        self._directory = Directory(num_slots)
        self._read_before: list[Tensor] = []
        """Slots that were read alone and are free again."""
        self._next_to_read = num_slots
        """The first one that never was."""

    def find(self, rows: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Their slots; EMPTY where one does not lie near."""
        return self._directory.find(rows)

    def pin(self, rows: Int[Tensor, " n"]) -> tuple[Pinned, Int[Tensor, " m"]]:
        """Keep those that lie near where they are, and tell which of them do not: places in `Pinned.rows`, whose slots
        are to be given."""
        distinct = unique(rows)
        pinned = Pinned(distinct.rows, self.find(distinct.rows), distinct.inverse)
        is_here = pinned.slots >= 0
        self._num_pins[pinned.slots[is_here]] += 1
        return pinned, torch.nonzero(~is_here).squeeze(1)

    def give(self, pinned: Pinned, places: Int[Tensor, " m"], slots: Int[Tensor, " m"]) -> None:
        """Slots, as `take` or `take_to_read` have found them, for the rows at some places."""
        pinned.slots[places] = slots
        if slots.numel() and slots[0] < self.num_slots:
            rows = pinned.rows[places]
            self._num_pins[slots] += 1
            self.rows[slots] = rows
            self._directory.insert(rows, slots)
            self._policy.admit(slots, rows)

    def use(self, pinned: Pinned) -> None:
        """They are asked for by a batch that will change them."""
        self.is_dirty[pinned.slots] = True
        self._policy.touch(pinned.slots, pinned.rows, pinned.inverse.numel())

    def unpin(self, pinned: Pinned) -> None:
        """The batch is over."""
        slots = pinned.slots
        self._num_pins[slots[(slots >= 0) & (slots < self.num_slots)]] -= 1
        to_read = slots[slots >= self.num_slots]
        if to_read.numel():
            self._read_before.append(to_read)

    def take(self, count: int) -> Int[Tensor, " n"] | None:
        """So many slots that nobody needs; None where there are not as many. The rows that are in them lie near until
        `leave`."""
        return self._policy.choose(count, self.rows[: self.num_slots], self._num_pins)

    def take_to_read(self, count: int) -> Int[Tensor, " n"] | None:
        """So many slots for rows that are read alone; None where there are not as many."""
        free = torch.cat([*self._read_before, torch.empty(0, dtype=torch.int64)])
        fresh = max(count - len(free), 0)
        if self._next_to_read + fresh > len(self.rows):
            return None
        free = torch.cat([free, torch.arange(self._next_to_read, self._next_to_read + fresh)])
        self._next_to_read += fresh
        self._read_before = [free[count:]]
        return free[:count]

    def leave(self, slots: Int[Tensor, " n"]) -> None:
        """The rows in some slots lie near no longer."""
        rows = self.rows[slots]
        self._directory.remove(rows[rows != EMPTY])
        self.rows[slots] = EMPTY
        self.is_dirty[slots] = False

    def clean(self, slots: Int[Tensor, " n"]) -> None:
        """The far side has the values of these; batches under way will change theirs all the same."""
        self.is_dirty[slots] = self._num_pins[slots] > 0

    @property
    def num_free(self) -> int:
        """Slots that nobody needs."""
        return int((self._num_pins == 0).sum())

    def dirty(self) -> Int[Tensor, " n"]:
        """Slots whose rows the far side has older, by row."""
        slots = torch.nonzero(self.is_dirty).squeeze(1)
        return slots[torch.argsort(self.rows[slots])]
