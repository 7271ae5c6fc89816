"""Metrics of several ranks have the bits of one process."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from meseta.comm import World
from meseta.train.evaluate import gather_windows
from meseta.train.metrics import LifetimeWindow, MetricWindow, TaskWindows

from .pool import RankPool

Ranks = Callable[[int], RankPool]


TASKS = ("click", "buy")


def metrics_of(num_ranks: int, rank: int, gather: Callable[[TaskWindows], TaskWindows]) -> list[str]:
    """Return metrics of two windows and of two lifetimes for a rank's contiguous slices of ten batches."""
    rng = np.random.default_rng(0)
    windows, lifetimes = TaskWindows(TASKS, MetricWindow), TaskWindows(TASKS, LifetimeWindow)
    for _ in range(10):
        labels = (rng.random((120, 2)) < 0.2).astype(np.float32)
        logits = np.round(rng.normal(size=(120, 2)) + labels, 1).astype(np.float32)  # many ties
        weights = rng.exponential(size=120) * (rng.random(120) < 0.8)
        groups = rng.integers(0, 40, 120)
        local = np.array_split(np.arange(120), num_ranks)[rank]
        windows.add(logits[local], labels[local], weights[local], groups[local])
        lifetimes.add(logits[local], labels[local], weights[local])
    gathered = [gather(windows)[task] for task in TASKS] + [gather(lifetimes)[task] for task in TASKS]
    return [json.dumps(window.compute().to_dict()) for window in gathered]


def gathered_metrics() -> list[str]:
    world = World.current()
    return metrics_of(world.size, world.rank, lambda windows: gather_windows(windows, world))


def test_figures_of_four_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    alone = metrics_of(1, 0, lambda windows: windows)
    assert ranks(4).run(gathered_metrics) == [alone] * 4
