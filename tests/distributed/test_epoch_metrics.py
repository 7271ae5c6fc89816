"""Metrics by hour and by new ids of two ranks have the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from meseta.comm import World
from train.daily.epoch_cases import add_in_batches, draw_rows, make_metrics

from .pool import RankPool

Ranks = Callable[[int], RankPool]


def metrics_of(world: World, max_exact_samples: int) -> tuple[dict[str, Any], dict[str, str]]:
    rows = draw_rows(2001, 2, weighted=True, masked=True, num_hours=3)
    metrics = make_metrics(2, world, max_exact_samples=max_exact_samples)
    add_in_batches(metrics, rows, rank=world.rank, num_ranks=world.size)
    bits = {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in metrics.get_tensors().items()}
    return metrics.compute().to_dict(), bits


def metrics_of_ranks(max_exact_samples: int) -> tuple[dict[str, Any], dict[str, str]]:
    return metrics_of(World.current(), max_exact_samples)


@pytest.mark.parametrize("max_exact_samples", [2001, 2000])
def test_two_ranks_have_the_bits_of_one_process(ranks: Ranks, max_exact_samples: int) -> None:
    record, tensors = metrics_of(World.single(), max_exact_samples)
    assert ("auc_error_bound" in record["total"]) is (max_exact_samples < 2001)
    assert ranks(2).run(metrics_of_ranks, max_exact_samples) == [(record, tensors), (record, {})]
