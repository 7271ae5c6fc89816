"""Sizes of a global batch, and the slice of it that one rank trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meseta.comm.sums import ordered_sum
from meseta.comm.world import World


@dataclass(frozen=True)
class BatchTotals:
    """Sizes of a global batch, or of the part that one rank has."""

    num_samples: int
    """Number of samples, including padding."""
    num_padding: int
    """Number of samples that only pad the batch to its full size."""
    weight: float
    """Sum of the sample weights."""

    @staticmethod
    def sum_over_ranks(totals: Sequence[BatchTotals], per_host: int) -> BatchTotals:
        """Return the totals of a global batch, given those of each rank. Weights are added by `ordered_sum`."""
        weights = torch.tensor([entry.weight for entry in totals], dtype=torch.float64)
        weight = weights.new_empty(1)
        ordered_sum(list(weights.split(1)), weight, per_host)
        return BatchTotals(sum(t.num_samples for t in totals), sum(t.num_padding for t in totals), weight.item())


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Slice of a global batch that one rank trains, with all that a layer needs to compute as in one process."""

    world: World
    step: int
    """Number of steps before this one."""
    batch_size_per_rank: tuple[int, ...]
    """Number of samples of each rank in the global batch, or in the micro-batch with gradient accumulation."""
    offset: int | None = None
    """Index of the first sample of this rank in the global batch. `None` if the slices of the ranks follow each other
    in rank order."""

    @property
    def num_samples(self) -> int:
        return sum(self.batch_size_per_rank)

    @property
    def first_sample(self) -> int:
        return sum(self.batch_size_per_rank[: self.world.rank]) if self.offset is None else self.offset

    @property
    def local_share(self) -> float:
        """Share of this rank in the samples of all ranks. It weights a mean over this rank's samples in the global
        mean."""
        # All ranks may be without samples.
        return self.batch_size_per_rank[self.world.rank] / max(self.num_samples, 1)
