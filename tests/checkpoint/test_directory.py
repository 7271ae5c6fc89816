"""Tests that a process that dies leaves the old or the new checkpoint. Also tests of names, pruning and removal of
leftovers."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint.running import FUSE, Killed
from checkpoint.saver import load_version, save_for_ever, save_version, tables_of
from checkpoint.simulated import assert_holds
from forked import killed_while_saving
from meseta.checkpoint import latest_complete, prune, verify
from meseta.checkpoint.files import layout
from meseta.spec import MesetaError
from sampling import sample


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)


def check_latest(parent: Path, at_least: int) -> int:
    """Check that the newest checkpoint is complete and not older than the last reported one. Return its version."""
    path = latest_complete(parent)
    assert path is not None
    version, shards = load_version(path)
    assert version >= at_least
    assert_holds(shards, tables_of(version))
    return version


def test_kill_9_while_saving(tmp_path: Path) -> None:
    """After each of six kills, the next process continues in the same directory."""
    rng = random.Random(0)
    saved = -1
    for _ in range(6):
        saved = killed_while_saving(save_for_ever, (tmp_path, saved + 1), rng.uniform(0.0, 0.3), saved)
        saved = check_latest(tmp_path, at_least=saved)


@pytest.mark.parametrize("first", sample(range(8), k=1, seed=0))
def test_death_at_every_change_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Replace a step, add the next one and delete the older. The process dies before every eighth change in turn."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the page cache outlives a process
    save_version(tmp_path / "start", 0)
    for left in range(first, 1000, 8):
        parent = tmp_path / str(left)
        shutil.copytree(tmp_path / "start", parent)
        done = 0
        with suppress(Killed), FUSE.lit(left):
            for version in (1, 2):
                save_version(parent, version)
                done = version
            prune(parent, keep_last=1)
        assert check_latest(parent, at_least=done) <= done + 1
        save_version(parent, 4)
        assert not list(parent.glob(".*"))
        for path in parent.iterdir():
            verify(path)
        if not FUSE.burnt:
            break
        shutil.rmtree(parent)
    assert left > 40


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "missing") is None
    assert latest_complete(tmp_path) is None
    (tmp_path / "step-000000007").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "file").write_text("")
    assert latest_complete(tmp_path) is None


def test_latest_compares_steps_and_skips_incomplete_checkpoints(tmp_path: Path) -> None:
    for version in (2, 20, 200):
        save_version(tmp_path, version)
    assert latest_complete(tmp_path) == tmp_path / "step-000000100"
    os.truncate(tmp_path / "step-000000100" / "dense.safetensors", 1)
    assert latest_complete(tmp_path) == tmp_path / "step-000000010"
    next((tmp_path / "step-000000010").rglob("*.arrow")).unlink()
    assert latest_complete(tmp_path) == tmp_path / "step-000000001"
    os.rename(tmp_path / "step-000000001", tmp_path / ".tmp-step-000000001")
    assert latest_complete(tmp_path) is None


def test_steps_of_ten_digits_come_last(tmp_path: Path) -> None:
    for step in (999_999_999, 1_000_000_000):
        save_version(tmp_path, 2 * step)
    assert latest_complete(tmp_path) == tmp_path / "step-1000000000"


def test_latest_does_not_go_back_behind_a_newer_format(tmp_path: Path) -> None:
    save_version(tmp_path, 2)
    save_version(tmp_path, 4)
    manifest = tmp_path / "step-000000002" / "manifest.json"
    manifest.write_text(json.dumps({"format": "meseta.checkpoint/3"}))
    with pytest.raises(MesetaError, match=r"format must be .*, got 'meseta.checkpoint/3'"):
        load_version(latest_complete(tmp_path))


def test_prune_reads_nothing_if_none_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_version(tmp_path, 2)
    save_version(tmp_path, 4)
    monkeypatch.setattr("meseta.checkpoint.store.store.read_manifest", lambda path: pytest.fail(f"read {path}"))
    assert prune(tmp_path, keep_last=2) == []


def test_prune_keeps_the_newest_that_are_whole(tmp_path: Path) -> None:
    for version in (2, 4, 6, 8):
        save_version(tmp_path, version)
    os.truncate(tmp_path / "step-000000004" / "dense.safetensors", 1)
    assert prune(tmp_path, keep_last=2) == [tmp_path / "step-000000001"]
    assert prune(tmp_path, keep_last=2) == []
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["2", "3", "4"]
    assert prune(tmp_path / "missing", keep_last=1) == []
    with pytest.raises(MesetaError, match="keep_last must be at least 1, got 0"):
        prune(tmp_path, keep_last=0)


def test_one_step_saved_twice(tmp_path: Path) -> None:
    save_version(tmp_path, 2)
    save_version(tmp_path, 3)
    assert check_latest(tmp_path, at_least=3) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
