"""One gradient norm over the layers and tables of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from meseta.comm import World
from meseta.optim.dense import GradientClipper, NormExchange
from meseta.spec.transfer import GRADIENT_NORM


def clip_over_ranks(clip: GradientClipper, world: World) -> GradientClipper:
    """Return `clip` with the exchange that a norm with rows requires on several ranks, and otherwise unchanged."""
    if not clip.includes_rows or world.size == 1:
        return clip

    def gather(numbers: list[float]) -> list[float]:
        local = torch.tensor(numbers, dtype=torch.float64, device=world.device)
        gathered: list[float] = world.all_gather(local, GRADIENT_NORM).flatten().tolist()
        return gathered

    exchange = NormExchange(
        gather=gather, counts_replicated=world.rank == 0, counts_sharded=world.rank < world.ranks_per_host
    )
    return replace(clip, exchange=exchange)
