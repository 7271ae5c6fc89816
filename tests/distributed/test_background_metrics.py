"""Lines of several ranks, which a thread of rank 0 computes and writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta.spec import MesetaError
from meseta.train.run_dir import RunDir
from small_run import metrics, settings, train

from .pool import RankPool
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]


def train_with_full_disk(document: dict[str, Any]) -> tuple[str, list[str]]:
    """Return (error, threads left) of a run in which rank 0 cannot write the line of step 4."""
    append, before = RunDir.append_metrics, set(threading.enumerate())

    def fail(self: RunDir, line: Any) -> None:
        if line.step == 4:
            raise MesetaError("no space left")
        append(self, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "append_metrics", fail)
        with pytest.raises(MesetaError) as caught:
            train(document)
    return str(caught.value), [thread.name for thread in set(threading.enumerate()) - before]


@pytest.mark.parametrize("log_every", [1, 4])
def test_an_error_of_a_line_is_raised_on_all_ranks(ranks: Ranks, tiny: Path, tmp_path: Path, log_every: int) -> None:
    """With lines every step, the next line raises it. Otherwise an evaluation does."""
    changes = {"plan": ROW_WISE, "train__log_every_steps": log_every, "train__eval_every_steps": 6}
    left = ranks(2).run(train_with_full_disk, settings(tiny, tmp_path / "run", **changes))
    assert {error for error, _ in left} == {"no space left"}
    assert not any("metrics" in name for _, names in left for name in names)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3][: 4 - log_every]
