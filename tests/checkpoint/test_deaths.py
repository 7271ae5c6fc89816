"""Tests of a process that saves, prunes and compacts deltas, and dies before any change of the file system. The next
one resumes from a saved checkpoint and removes partial files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint.running import FUSE, SPECS, Killed, Run, holds, loads
from checkpoint.simulated import plain_plan
from meseta.checkpoint import compact, compare, latest_complete, list_checkpoints, summarize, verify
from meseta.checkpoint.files import layout
from meseta.checkpoint.store.directory import PRUNED_MARKER
from meseta.checkpoint.store.store import list_candidates
from sampling import product, sample

POLICIES = ("one_shot", "consecutive", "intermittent", "rolling")
PLAN = plain_plan(SPECS, 1, "table_wise")
STRIDE = 64
"""Stride of the changes before which the process dies, from the first one that a case names."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the page cache outlives a process


def begun(folder: Path, policy: str) -> Run:
    """Save four steps, of which two are kept."""
    run = Run(folder, PLAN, deltas=policy, max_chain=3, keep_last=2)
    for step in range(1, 5):
        run.train(step)
        assert run.save(step) == [None]
    return run


def on(run: Run, made: Path) -> None:
    """Save two more steps, the first of which is pruned immediately, and compact both."""
    for step in (5, 6):
        run.train(step)
        assert run.save(step) == [None]
        compact(run.folder / f"step-{step:09d}", made)


def check(folder: Path, made: Path, run: Run) -> int:
    """Check that the newest checkpoint is complete, and that a compacted one is complete or missing. Return the newest
    step."""
    path = latest_complete(folder)
    assert path is not None
    step = holds(loads(path, PLAN), run.history)
    for whole in list_candidates(made):
        assert holds(loads(whole, PLAN), run.history) == int(whole.name[-9:])
        assert summarize(whole).policy is None
    return step


def check_nothing_is_left(folder: Path, made: Path) -> None:
    """Check that only complete checkpoints, and files of pruned ones that they need, are left."""
    assert not list(folder.glob(".*")) and not list(made.glob(".*"))
    for path in (*list_candidates(folder), *list_candidates(made)):
        verify(path)
    needed = {
        f"step-{step:09d}" for listed in list_checkpoints(folder) if listed.summary for step in listed.summary.needs
    }
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in list_candidates(folder)} | {
        path.parent.name for path in folder.glob(f"*/{PRUNED_MARKER}")
    }
    assert names - {path.name for path in list_candidates(folder)} <= needed


@pytest.mark.parametrize("case", sample(product(policy=POLICIES, first=range(STRIDE)), k=1, seed=1))
def test_death_at_every_change(tmp_path: Path, case: dict[str, object]) -> None:
    policy, first = str(case["policy"]), int(str(case["first"]))
    start = begun(tmp_path / "start", policy)
    for left in range(first, 2000, STRIDE):
        folder, made = tmp_path / str(left) / "checkpoints", tmp_path / str(left) / "made"
        shutil.copytree(tmp_path / "start", folder)
        run = Run(folder, PLAN, **start.settings)
        run.history = dict(start.history)
        run.resume(folder / "step-000000004")
        with suppress(Killed), FUSE.lit(left):
            on(run, made)
        burnt = FUSE.burnt
        newest = check(folder, made, run)
        assert newest >= 4

        history, run = run.history, Run(folder, PLAN, **start.settings)
        run.history = history
        run.resume(folder / f"step-{newest:09d}")
        for step in (7, 8):
            run.train(step)
            assert run.save(step) == [None]
            whole = compact(folder / f"step-{step:09d}", made)
            assert list(compare(whole, folder / whole.name)) == []
        assert check(folder, made, run) == 8
        check_nothing_is_left(folder, made)
        shutil.rmtree(tmp_path / str(left))
        if not burnt:
            break
    assert not burnt and left > 200
