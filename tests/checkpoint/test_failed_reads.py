"""A read that fails says nothing about a checkpoint: nothing is deleted or set aside for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint.running import SPECS, Run, holds, loads
from checkpoint.simulated import plain_plan
from failing_reads import ERRORS, Read, failing_reads
from meseta.checkpoint import verify
from meseta.checkpoint.files import layout
from meseta.checkpoint.store.store import named

PLAN = plain_plan(SPECS, 1, "table_wise")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def check_kept(run: Run) -> None:
    """Every checkpoint verifies, and has the bits that the run had at its step."""
    paths = named(run.folder)
    assert paths
    for path in paths:
        assert holds(loads(path, PLAN), run.history) == int(path.name[-9:])
        verify(path)


@pytest.mark.parametrize("error", ERRORS)
def test_pruning_keeps_what_the_newest_needs(tmp_path: Path, error: int) -> None:
    """The newest of a chain of 8, whose manifest is read twice while the run prunes: the second time in vain."""
    run = Run(tmp_path / "run", PLAN, deltas="consecutive", max_chain=8, keep_last=1)
    for step in range(1, 8):
        run.train(step)
        assert run.save(step) == [None]
    manifest, opened = f"{run.folder}/step-000000008/manifest.json", [0]

    def choose(read: Read) -> int | None:
        if read.path != manifest or read.kind != "open":
            return None
        opened[0] += 1
        return error if opened[0] == 2 else None

    run.train(8)
    with failing_reads(run.folder, choose=choose):
        run.save(8)
    assert opened[0] >= 2
    check_kept(run)
