"""Replicated rows selected on the device by kernels have the bits of rows selected on the host. Kernels run in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meseta.embedding import replicas
from meseta.ops.row_update.call import Bags, UpdateCall, UpdateGroup

from .pool import RankPool
from .scenario import Scenario, train

Ranks = Callable[[int], RankPool]
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)


def by_kernels(
    group: UpdateGroup,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Tensor | None = None,
) -> None:
    """Run the operator's GPU kernel."""
    from meseta.ops.row_update import triton

    tables = group.weights, group.states, group.program.fused_update.instructions, group.uniforms(lr, step)
    fields = group.state_is_row, group.origins, group.feature_fields
    batch = bags.ids, bags.offsets, bags.num_samples, list(gradients), bags.weights
    triton.row_update(UpdateCall(*tables, *fields, *batch, step, found_inf))


def train_by_kernels(scenario: Scenario) -> dict[str, Any]:
    """Train with rows selected on the device."""
    made = replicas.ReplicatedRows.__init__

    def make(self: replicas.ReplicatedRows, *arguments: Any) -> None:
        made(self, *arguments)
        self.selects_on_device = True

    with (
        mock.patch.object(replicas, "row_update", by_kernels),
        mock.patch.object(replicas.ReplicatedRows, "__init__", make),
    ):
        return train(scenario)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("sharding", "optimizer"), [("data_parallel", "adam"), ("hot_replicated", "rowwise_adagrad")])
def test_rows_are_selected_on_the_device(ranks: Ranks, sharding: str, optimizer: str) -> None:
    pytest.importorskip("triton")
    scenario = Scenario(sharding, "sum", weighted=False, optimizer=optimizer, num_steps=2, batch_size=4)
    plain, selected = ranks(2).run(train, scenario), ranks(2).run(train_by_kernels, scenario)
    for on_device, on_host in zip(selected, plain, strict=True):
        for (place, weight, state), (same, expected, kept) in zip(on_device["shards"], on_host["shards"], strict=True):
            assert place == same and torch.equal(weight, expected)
            assert all(torch.equal(state[name], kept[name]) for name in kept)
