"""Whole runs whose reading thread packs batches, as on a GPU: the same bits as without. The device is a fake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from late_copies import KilledRun, late_device
from meseta.ops.common import MAX_PENDING_COPIES
from small_run import final_checksum, metrics, settings, train, without_times

COMMON = {"train__epochs": 2, "train__eval_every_steps": 7, "checkpoint__every_steps": 3}


@pytest.mark.parametrize("accumulate_steps", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_killed_run_with_packed_batches_equals_a_run_without(
    tiny: Path, tmp_path: Path, accumulate_steps: int
) -> None:
    common = COMMON | {"train__accumulate_steps": accumulate_steps}
    train(settings(tiny, tmp_path / "plain", **common))
    document, threads = settings(tiny, tmp_path / "packed", **common), set[str]()
    with late_device(threads, killed_at=11), pytest.raises(KilledRun):
        train(document)
    torch.manual_seed(99)
    with late_device(threads) as device:
        train(document)
    assert without_times(metrics(tmp_path / "packed")) == without_times(metrics(tmp_path / "plain"))
    assert final_checksum(tmp_path / "packed") == final_checksum(tmp_path / "plain")
    device.check_copies()
    assert threads == {"meseta-prefetch"}
    # One batch is in the queue, one waits for space in it, and one waits for its step.
    assert len(device.copies) == 19 * accumulate_steps
    assert device.num_buffers <= 3 * accumulate_steps + MAX_PENDING_COPIES
