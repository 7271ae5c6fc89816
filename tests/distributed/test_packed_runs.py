"""Ranks whose reading threads pack batches, as on a GPU: the same bits as without. The device is a fake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from late_copies import train_packed
from small_run import final_checksum, settings, train

from .pool import RankPool


@pytest.mark.soak
def test_packed_batches_change_no_bit(tiny: Path, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    plan = {"tables": {"user": "row_wise", "*": "table_wise"}}
    for name, run in (("plain", train), ("packed", train_packed)):
        ranks(2).run(run, settings(tiny, tmp_path / name, plan=plan, train__max_steps=5))
    assert final_checksum(tmp_path / "packed") == final_checksum(tmp_path / "plain")
