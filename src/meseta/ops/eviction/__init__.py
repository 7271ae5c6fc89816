"""Which rows leave a cache: those that were asked for least, of late."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.core import core
from meseta.spec import MesetaError

HALF_LIVES = (4, 1, 2, 16)
"""Lookups for each slot after which a request counts half: the first one, until trials tell another."""
GHOST_SCORES_PER_SLOT = 8
"""Scores kept of rows that have left, for each slot, where the table has as many rows."""
MAX_POLICY_BYTES_PER_SLOT = 1 + GHOST_SCORES_PER_SLOT + 9
"""A slot takes so many at most: its score, those that are kept, and trials, which large caches alone have."""


class EvictionPolicy:
    """LRFU (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
    policies", IEEE Transactions on Computers 2001), by the batch.

    The score of a row is the sum over all requests of (1/2)^(their age in half-lives). The rows of least score leave:
    not of all, but of some that follow the hand of a clock. Scores of rows that have left are kept, by row modulo their
    number, so that a row which comes again and again is known. A row of a single request, as a scan has them, leaves
    soon. A score is one byte: its logarithm, in steps of 1/8.

    A long half-life suits rows that stay as popular as they are, a short one a hot set that moves. From 8,192 slots on,
    caches of a sample of the rows are tried beside (Waldspurger et al., "Cache modeling and optimization using
    miniature simulations", USENIX ATC 2017), one of each half-life, and that with the fewest misses tells which is
    used.

    The batches alone decide, and no threads. One thread at a time may use it.
    """

    def __init__(self, num_slots: int, num_rows: int) -> None:
        """Slots 0..num_slots-1, all empty, of a table of `num_rows` rows. Raises MesetaError where there are none."""
        if num_slots < 1 or num_rows < 1:
            raise MesetaError(f"eviction: {num_slots} slots for {num_rows} rows; there must be one of each at least")
        half_lives = [times * num_slots for times in HALF_LIVES]
        self._policy = core().eviction(num_slots, min(num_rows, GHOST_SCORES_PER_SLOT * num_slots), half_lives)

    def num_bytes(self) -> int:
        """Of memory."""
        return int(core().eviction_bytes(self._policy))

    @property
    def half_life(self) -> int:
        """The one that is used, in lookups."""
        return int(core().eviction_half_life(self._policy))

    def touch(self, slots: Int[Tensor, " n"], rows: Int[Tensor, " n"], num_lookups: int) -> None:
        """These rows, each once, which lie in these slots, were asked for by a batch of so many lookups. Raises
        MesetaError for slots that there are not."""
        try:
            core().eviction_touch(self._policy, slots.numpy(), rows.numpy(), num_lookups)
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None

    def admit(self, slots: Int[Tensor, " n"], rows: Int[Tensor, " n"]) -> None:
        """These rows, not negative, come into these slots, with the scores that are kept of them. Raises MesetaError as
        `touch` does."""
        try:
            core().eviction_admit(self._policy, slots.numpy(), rows.numpy())
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None

    def choose_victims(
        self, count: int, rows: Int[Tensor, " slots"], num_pins: Int[Tensor, " slots"]
    ) -> Int[Tensor, " count"] | None:
        """So many slots whose rows are to leave, those that were never used first; None where fewer have no pin.

        `rows` int64 are those in the slots, negative where there is none; `num_pins` int32 tell who needs them. Raises
        MesetaError where these are not as many as there are slots.
        """
        slots = torch.empty(count, dtype=torch.int64)
        try:
            enough = core().eviction_choose(self._policy, rows.numpy(), num_pins.numpy(), slots.numpy())
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None
        return slots if enough else None
