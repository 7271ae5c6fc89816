"""Runs on two ranks save by the clock, and in the background."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta import checkpoint
from meseta.spec import MesetaError
from meseta.system import files
from small_run import settings, train

from .pool import RankPool

CHANGES = {
    "train__max_steps": 4,
    "checkpoint__every_minutes": 1e-9,
    "checkpoint__keep_last": 9,
    "model__embedding_dim": 32,
    "plan": {"tables": {"city": "data_parallel", "item": "column_wise", "tags": "row_wise", "user": "table_wise"}},
}


def test_background_saves_write_the_same_checkpoints(
    ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path
) -> None:
    sums = []
    for background in ("always", "never"):
        run_dir = tmp_path / background
        ranks(2).run(train, settings(tiny, run_dir, checkpoint__background=background, **CHANGES))
        saved = sorted((run_dir / "checkpoints").iterdir())
        assert [path.name[-1] for path in saved] == ["1", "2", "3", "4"]
        sums.append([checkpoint.verify(path) for path in saved])
    assert sums[0] == sums[1]


def refused_here(document: dict[str, Any]) -> str:
    """Return the error of a run whose disk is full from the second checkpoint on. Runs on every rank."""
    really = os.replace

    def rename(source: Any, target: Any, **more: Any) -> None:
        if "step-000000002" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(source, target, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "replace", rename)
        with pytest.raises(MesetaError) as refusal:
            train(document)
    return str(refusal.value)


def test_a_failed_background_save_ends_all_ranks(ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path, checkpoint__background="always", **CHANGES | {"train__max_steps": 40})
    messages = ranks(2).run(refused_here, document)
    assert all("No space left on device" in message for message in messages)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
