"""Which rows leave a cache: those that were asked for least, of late."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.core import core
from meseta.ops.eviction.reference import STEPS
from meseta.spec import MesetaError

HALF_LIFE = 4
"""Lookups for each slot after which a request counts half. With 10 % of rows near it is long enough to know which rows
are asked for often, and short enough to forget those that no longer are (benchmarks/bench_tiers.py misses)."""
WINDOW = 8
"""Slots looked at for each that is needed."""
KEPT_PER_SLOT = 8
"""Scores kept of rows that have left, for each slot, where the table has as many rows."""
BEGIN = 24 * STEPS
"""Score of a request; scores lie up to 24 halvings below it and 8 above."""


class EvictionPolicy:
    """LRFU (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
    policies", IEEE Transactions on Computers 2001), by the batch.

    The score of a row is the sum over all requests of (1/2)^(their age in half-lives). The rows of least score leave:
    not of all, but of some that follow the hand of a clock. Scores of rows that have left are kept, by row modulo their
    number, so that a row which comes again and again is known. A row of a single request, as a scan has them, leaves
    soon. A score is one byte, its logarithm in steps of 1/8; so a slot takes `1 + KEPT_PER_SLOT` bytes.

    Numbers of batches alone decide, and no threads.
    """

    def __init__(self, num_slots: int, num_rows: int) -> None:
        """Slots 0..num_slots-1, all empty, of a table of `num_rows` rows. Raises MesetaError where there are none."""
        if num_slots < 1 or num_rows < 1:
            raise MesetaError(f"eviction: {num_slots} slots for {num_rows} rows; there must be one of each at least")
        self.num_slots = num_slots
        self._scores = torch.zeros(num_slots, dtype=torch.uint8)
        self._kept = torch.zeros(min(num_rows, KEPT_PER_SLOT * num_slots), dtype=torch.uint8)
        self._num_used = 0
        """Slots that were ever given: the first ones."""
        self._hand = 0
        self._num_lookups = 0
        """Since requests counted half the last time."""

    def num_bytes(self) -> int:
        """Of memory."""
        return self._scores.nbytes + self._kept.nbytes

    @property
    def now(self) -> int:
        """What a request counts: scores grow with time, instead of falling all."""
        return BEGIN + STEPS * self._num_lookups // (HALF_LIFE * self.num_slots)

    def touch(self, slots: Int[Tensor, " n"], num_lookups: int) -> None:
        """The rows in these slots, each once, were asked for by a batch of so many lookups."""
        _run("eviction_touch", self._scores.numpy(), slots.numpy(), self.now)
        self._num_lookups += num_lookups
        halvings, self._num_lookups = divmod(self._num_lookups, HALF_LIFE * self.num_slots)
        if halvings:
            _run("eviction_age", self._scores.numpy(), self._kept.numpy(), min(halvings, 32))

    def admit(self, slots: Int[Tensor, " n"], rows: Int[Tensor, " n"]) -> None:
        """These rows, not negative, come into these slots, with the scores that are kept of them."""
        _run("eviction_admit", self._scores.numpy(), self._kept.numpy(), slots.numpy(), rows.numpy())

    def choose(
        self, count: int, rows: Int[Tensor, " slots"], num_pins: Int[Tensor, " slots"]
    ) -> Int[Tensor, " count"] | None:
        """So many slots whose rows are to leave, those that were never used first; None where fewer have no pin.

        `rows` int64 are those in the slots, negative where there is none; `num_pins` int32 tell who needs them.
        """
        fresh = min(count, self.num_slots - self._num_used)
        slots = torch.empty(count, dtype=torch.int64)
        hand = _run(
            "eviction_choose",
            self._scores[: self._num_used].numpy(),
            self._kept.numpy(),
            rows.numpy(),
            num_pins.numpy(),
            slots[fresh:].numpy(),
            self._hand,
            WINDOW,
        )
        if hand < 0:
            return None
        torch.arange(self._num_used, self._num_used + fresh, out=slots[:fresh])
        self._hand = hand
        self._num_used += fresh
        return slots


def _run(function: str, *arguments: object) -> int:
    try:
        return getattr(core(), function)(*arguments) or 0
    except (ValueError, TypeError) as error:
        raise MesetaError(f"eviction: {error}; give int64 slots of the policy, and rows and pins of each") from None
