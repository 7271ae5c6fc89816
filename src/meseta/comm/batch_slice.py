"""Where a rank's samples stand in the global batch."""

from __future__ import annotations

from dataclasses import dataclass

from meseta.comm.world import World


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """This rank's slice of a global batch: what a layer must know to compute as if there were one rank."""

    world: World
    step: int
    """Steps trained before."""
    sizes: tuple[int, ...]
    """Samples of each rank; their sum is the global batch, or the micro-batch where gradients are accumulated."""
    first: int | None = None
    """Place of this rank's first sample in the global batch; None: behind the samples of the ranks before."""

    @property
    def num_samples(self) -> int:
        """Over all ranks."""
        return sum(self.sizes)

    @property
    def first_sample(self) -> int:
        """Place of this rank's first sample in the global batch."""
        return sum(self.sizes[: self.world.rank]) if self.first is None else self.first

    @property
    def local_share(self) -> float:
        """B_local / B_global: a gradient on this rank times this is its part of the gradient of the global mean."""
        return self.sizes[self.world.rank] / max(self.num_samples, 1)
