"""Choice of the rows that are evicted from a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.ops.core import core
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError

# Trials switch to another half-life if it causes fewer misses.
HALF_LIVES = (4, 1, 2, 16)
"""Candidate half-lives of requests, in lookups per slot. The first one is used initially."""
GHOST_SCORES_PER_SLOT = 8
"""Number of ghost scores per slot, limited by the number of rows of the table."""
MAX_POLICY_BYTES_PER_SLOT = 1 + GHOST_SCORES_PER_SLOT + 9
"""Maximum memory per slot: its score, ghost scores, and the trials of large caches."""


class EvictionPolicy:
    """LRFU eviction policy, applied per batch (Lee et al., IEEE Transactions on Computers 2001).

    The score of a row is the sum over its requests of (1/2)^(age / half-life). Rows with the lowest scores among a
    window of slots are evicted first. The choice depends on the batches only, not on threads. Not thread-safe.
    """

    # Full title: "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
    # policies".
    #
    # The window moves through the slots like the hand of a clock, so that a choice does not read all scores. Ghost
    # scores of evicted rows are indexed by row modulo their number. A row that returns regularly thus keeps its score,
    # and a row with a single request, as from a scan, leaves soon. A score is one byte: its logarithm in steps of 1/8.
    #
    # A long half-life suits rows of constant popularity, a short one a hot set that changes. From 8,192 slots on, one
    # miniature cache per half-life simulates a sample of the rows (Waldspurger et al., "Cache modeling and optimization
    # using miniature simulations", USENIX ATC 2017). The half-life with the fewest misses is used.

    def __init__(self, num_slots: int, num_rows: int) -> None:
        """Create a policy for empty slots 0..num_slots-1 and a table of `num_rows` rows. Both must be at least 1."""
        if num_slots < 1 or num_rows < 1:
            raise MesetaError(f"eviction: {num_slots} slots for {num_rows} rows; both must be at least 1")
        half_lives = [times * num_slots for times in HALF_LIVES]
        self._policy = core().eviction(num_slots, min(num_rows, GHOST_SCORES_PER_SLOT * num_slots), half_lives)

    def num_bytes(self) -> int:
        """Return the memory of the policy in bytes."""
        return int(core().eviction_bytes(self._policy))

    @property
    def half_life(self) -> int:
        """Current half-life in lookups."""
        return int(core().eviction_half_life(self._policy))

    def touch(self, slots: Int[Tensor, " n"], rows: Int[Tensor, " n"], num_lookups: int) -> None:
        """Record `num_lookups` lookups of distinct rows in these slots. Raises MesetaError if a slot does not exist."""
        try:
            core().eviction_touch(self._policy, slots.numpy(), rows.numpy(), num_lookups)
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None

    def admit(self, slots: Int[Tensor, " n"], rows: Int[Tensor, " n"]) -> None:
        """Record that rows (not negative) were put into these slots, and restore their ghost scores. Raises MesetaError
        if a slot does not exist."""
        try:
            core().eviction_admit(self._policy, slots.numpy(), rows.numpy())
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None

    def choose_victims(
        self, count: int, rows: Int[Tensor, " slots"], num_pins: Int[Tensor, " slots"]
    ) -> Int[Tensor, " count"] | None:
        """Return `count` slots to evict, or `None` if fewer slots are unpinned. Empty slots come first.

        Args:
            count: Number of slots to return.
            rows: int64 row of each slot, negative for empty slots.
            num_pins: int32 number of pins of each slot.

        Raises:
            MesetaError: `rows` or `num_pins` do not have one entry per slot.
        """
        slots = torch.empty(count, dtype=torch.int64)
        try:
            enough = core().eviction_choose(self._policy, rows.numpy(), num_pins.numpy(), slots.numpy())
        except ValueError as error:
            raise MesetaError(f"eviction: {error}") from None
        return slots if enough else None
