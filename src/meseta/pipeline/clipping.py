"""One gradient norm over the layers and tables of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from meseta.comm import World
from meseta.optim.dense import GradientClipper, NormExchange
from meseta.spec.transfer import GRADIENT_NORM


def clip_over_ranks(clip: GradientClipper, world: World) -> GradientClipper:
    """Return `clip` with the exchange that a norm with rows requires on several ranks, and otherwise unchanged."""
    if not clip.includes_rows or world.size == 1:
        return clip

    def start_gather(numbers: list[float]) -> Callable[[], list[float]]:
        local = torch.tensor(numbers, dtype=torch.float64, device=world.device)
        pending = world.start_all_gather(local, GRADIENT_NORM)

        def wait() -> list[float]:
            gathered: list[float] = pending.wait().flatten().tolist()
            return gathered

        return wait

    return replace(clip, exchange=NormExchange(start_gather, counts_sharded=world.rank < world.ranks_per_host))
