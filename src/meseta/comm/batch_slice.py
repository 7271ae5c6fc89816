"""Where a rank's samples stand in the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meseta.comm.sums import ordered_sum
from meseta.comm.world import World


@dataclass(frozen=True)
class BatchTotals:
    """Of the samples of one rank in a global batch, or of all of them."""

    num_samples: int
    """Those that only fill the batch up, too."""
    num_padding: int
    """Those that only fill the batch up."""
    weight: float
    """The sum of their weights."""

    @staticmethod
    def sum_over_ranks(totals: Sequence[BatchTotals], per_host: int) -> BatchTotals:
        """Of a global batch, from those of its ranks; weights are added in the order of `meseta.comm.sums`."""
        weights = torch.tensor([own.weight for own in totals], dtype=torch.float64)
        weight = weights.new_empty(1)
        ordered_sum(list(weights.split(1)), weight, per_host)
        return BatchTotals(sum(t.num_samples for t in totals), sum(t.num_padding for t in totals), weight.item())


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """This rank's slice of a global batch: what a layer must know to compute as if there were one rank."""

    world: World
    step: int
    """Steps trained before."""
    batch_size_per_rank: tuple[int, ...]
    """Samples of each rank; their sum is the global batch, or the micro-batch where gradients are accumulated."""
    offset: int | None = None
    """Place of this rank's first sample in the global batch; None: behind the samples of the ranks before."""

    @property
    def num_samples(self) -> int:
        """Over all ranks."""
        return sum(self.batch_size_per_rank)

    @property
    def first_sample(self) -> int:
        """Place of this rank's first sample in the global batch."""
        return sum(self.batch_size_per_rank[: self.world.rank]) if self.offset is None else self.offset

    @property
    def local_share(self) -> float:
        """B_local / B_global: a gradient on this rank times this is its part of the gradient of the global mean."""
        return self.batch_size_per_rank[self.world.rank] / max(self.num_samples, 1)
