"""Figures of several ranks have the bits of one process."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from meseta.comm import World
from meseta.train.evaluate import gather_window
from meseta.train.metrics import LifetimeWindow, MetricWindow

from .pool import RankPool

Ranks = Callable[[int], RankPool]


def figures(num_ranks: int, rank: int, gather: Callable[[MetricWindow, LifetimeWindow], tuple]) -> list[str]:
    """What a rank makes of its contiguous slices of ten batches: the window's figures, and the lifetime's."""
    rng = np.random.default_rng(0)
    window, lifetime = MetricWindow(), LifetimeWindow()
    for _ in range(10):
        labels = (rng.random(120) < 0.2).astype(np.float32)
        logits = np.round(rng.normal(size=120) + labels, 1).astype(np.float32)  # many ties
        weights = rng.exponential(size=120) * (rng.random(120) < 0.8)
        groups = rng.integers(0, 40, 120)
        own = np.array_split(np.arange(120), num_ranks)[rank]
        window.add(logits[own], labels[own], weights[own], groups[own])
        lifetime.add(logits[own], labels[own], weights[own])
    return [json.dumps(gathered.compute().to_dict()) for gathered in gather(window, lifetime)]


def gathered_figures() -> list[str]:
    world = World.current()
    return figures(
        world.size,
        world.rank,
        lambda window, lifetime: (
            gather_window(window, world),
            LifetimeWindow.merge(world.gather_objects(lifetime.get_state())),
        ),
    )


def test_figures_of_four_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    alone = figures(1, 0, lambda *windows: windows)
    assert ranks(4).run(gathered_figures) == [alone] * 4
