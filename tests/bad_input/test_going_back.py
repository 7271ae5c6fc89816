"""Tests of checkpoint.resume 'older': a run with damaged checkpoints resumes from an older one and ends identically."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bad_input.commands import run_here, tree
from checkpoint.simulated import flip_middle
from meseta.checkpoint import latest_complete, list_checkpoints, newest, verify
from meseta.checkpoint.files.paths import QUARANTINE_MARKER, checkpoint_path
from meseta.checkpoint.store.store import make_store
from small_run import final_checksum, metrics, settings, train, without_times, write_config

EVERY_2: dict[str, Any] = {
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 20,
    "checkpoint__deltas": "consecutive",
    "checkpoint__max_chain": 9,
}
OLDER = {**EVERY_2, "checkpoint__resume": "older"}
ROWS = "tables/user/rows-00000.arrow"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A finished run of 14 steps, with a full checkpoint of step 2 and a delta every two steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(tiny, folder / "run", **EVERY_2))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def step_path(run: Path, step: int) -> Path:
    return checkpoint_path(run / "checkpoints", step)


def config(run: Path, tiny: Path, **changes: Any) -> Path:
    return write_config(run.parent / "c.yaml", settings(tiny, run, **changes))


def test_the_offer_names_all_that_need_the_file(tiny: Path, trained: Path, run: Path) -> None:
    """`auto` stops, and the offered command works."""
    flip_middle(step_path(run, 10) / ROWS)
    before = tree(run)
    ended = run_here("train", config(run, tiny, **EVERY_2))
    [line] = ended.err.splitlines()
    assert ended.code == 1 and line.startswith(f"error: checkpoint file '{step_path(run, 10) / ROWS}' must have the ch")
    newest = step_path(run, 14)
    assert line.endswith(
        f"'{step_path(run, 8)}' is intact; the same command resumes from it after `mv {newest} {newest}.damaged`, "
        "and the same for 'step-000000012' and 'step-000000010'"
    )
    assert tree(run) == before
    for step in (10, 12, 14):
        os.rename(step_path(run, step), f"{step_path(run, step)}.damaged")
    ended = run_here("train", config(run, tiny, **EVERY_2))
    assert ended.code == 0 and "resuming from step 8" in ended.err
    assert final_checksum(run) == final_checksum(trained)


def test_what_does_not_need_the_file_is_newest(tiny: Path, run: Path) -> None:
    flip_middle(step_path(run, 14) / ROWS)
    ended = run_here("eval", run)
    assert ended.code == 1 and f"'{step_path(run, 12)}' is intact" in ended.err and "and the same for" not in ended.err


@pytest.mark.parametrize("harm", ["content", "missing", "cut", "manifests", "another's"])
def test_it_goes_back_and_ends_with_the_same_bits(tiny: Path, trained: Path, run: Path, harm: str) -> None:
    """Each save replaces the damaged checkpoint of its step."""
    file = step_path(run, 10) / ROWS
    if harm == "content":
        flip_middle(file)
    elif harm == "missing":
        file.unlink()
    elif harm == "cut":
        os.truncate(file, 100)
    elif harm == "another's":
        shutil.copy(step_path(run, 8) / ROWS, file)
    else:
        flip_middle(step_path(run, 14) / "manifest.json")
        (step_path(run, 12) / "manifest.json").unlink()
        shutil.copy(step_path(run, 8) / "manifest.json", step_path(run, 10) / "manifest.json")
    ended = run_here("train", config(run, tiny, **OLDER))
    assert ended.code == 0, ended.err
    [note] = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert note.endswith(
        ": falling back to step-000000008 (checkpoint.resume 'older'), and quarantining step-000000014 "
        "and step-000000012 and step-000000010"
    )
    assert "resuming from step 8," in ended.err
    assert final_checksum(run) == final_checksum(trained)
    assert without_times(metrics(run)) == without_times(metrics(trained))
    assert not list(run.rglob(QUARANTINE_MARKER))
    assert [listed.problem for listed in list_checkpoints(run)] == [""] * 7


def test_quarantined_checkpoints_are_neither_used_nor_counted_nor_deleted(tiny: Path, run: Path) -> None:
    """Damaged checkpoints of steps that the run does not save stay, even if the missing file returns."""
    file = step_path(run, 10) / ROWS
    content = file.read_bytes()
    flip_middle(file)
    changes = {**OLDER, "checkpoint__every_steps": 3, "checkpoint__keep_last": 2}
    ended = run_here("train", config(run, tiny, **changes, train__max_steps=11))
    assert ended.code == 0, ended.err
    file.write_bytes(content)
    assert newest(run / "checkpoints") == latest_complete(run / "checkpoints") == step_path(run, 11)
    assert [listed.path.name[-2:] for listed in list_checkpoints(run)] == ["09", "11"]
    assert [metric["step"] for metric in metrics(run) if metric["kind"] == "train"] == [4, 8, 11]
    before = {step: tree(step_path(run, step)) for step in (10, 14)}
    assert all("must have the checksum" in str(tree[QUARANTINE_MARKER]) for tree in before.values())
    listed = run_here("checkpoint", "list", run)
    assert listed.code == 0 and listed.out.count("quarantined: it was damaged, and the run resumed from an older") == 3

    changes |= {"checkpoint__resume": "auto", "checkpoint__deltas": "rolling"}
    ended = run_here("train", config(run, tiny, **changes))
    assert ended.code == 0 and "resuming from step 11," in ended.err and "note: " not in ended.err
    assert [listed.path.name[-2:] for listed in list_checkpoints(run)] == ["12", "14"]
    assert tree(step_path(run, 10)) == before[10]
    for step in (12, 14):  # saved again
        assert not (step_path(run, step) / QUARANTINE_MARKER).exists()
        verify(step_path(run, step))


def test_none_is_whole(tiny: Path, run: Path) -> None:
    """'older' then stops as 'auto' does, and quarantines nothing."""
    flip_middle(step_path(run, 2) / "tables/user/block-00000.arrow")
    before = tree(run)
    ended = run_here("train", config(run, tiny, **OLDER))
    assert ended.code == 1 and ended.err.splitlines()[-1].endswith("no older checkpoint in its folder is intact")
    assert tree(run) == before


def test_going_back_is_refused_without_a_marker(tiny: Path, run: Path) -> None:
    """An untrusted link in place of the marker is not followed, so nothing is written through it."""
    flip_middle(step_path(run, 14) / ROWS)
    (step_path(run, 14) / QUARANTINE_MARKER).symlink_to(run.parent / "elsewhere")
    ended = run_here("train", config(run, tiny, **OLDER))
    assert ended.code == 0 and "resuming from step 12" in ended.err and "note: " not in ended.err
    assert not (run.parent / "elsewhere").exists()


def test_killed_while_it_goes_back(tiny: Path, trained: Path, run: Path) -> None:
    """Some checkpoints are quarantined before the kill, and others are not."""
    flip_middle(step_path(run, 10) / ROWS)
    (step_path(run, 14) / QUARANTINE_MARKER).write_text("")
    ended = run_here("train", config(run, tiny, **OLDER))
    assert ended.code == 0 and re.search("quarantining step-000000012 and step-000000010", ended.err)
    assert final_checksum(run) == final_checksum(trained)


def test_at_a_url(tiny: Path, trained: Path, tmp_path: Path) -> None:
    """Objects cannot be renamed, so the error offers the key. Quarantined checkpoints stay until their step is saved
    again."""
    url = f"memory://going-back-{tmp_path.name}"
    run, store = tmp_path / "run", fsspec.filesystem("memory")
    assert run_here("train", config(run, tiny, **EVERY_2, checkpoint__dir=url)).code == 0
    name = f"{url}/step-000000010/{ROWS}"
    content = bytearray(store.cat_file(name))
    content[len(content) // 2] ^= 1
    store.pipe_file(name, bytes(content))
    ended = run_here("train", config(run, tiny, **EVERY_2, checkpoint__dir=url))
    assert ended.code == 1
    assert ended.errors[0].endswith("is intact; the same command resumes from it with checkpoint.resume=older")
    stopped = {**OLDER, "checkpoint__dir": url, "train__max_steps": 9}
    ended = run_here("train", config(run, tiny, **stopped))
    assert ended.code == 0 and "falling back to step-000000008" in ended.err, ended
    assert [path.name[-2:] for path in make_store(url).list_candidates()] == ["02", "04", "06", "08", "09"]
    assert bytes(store.cat_file(name)) == content
    ended = run_here("train", config(run, tiny, **OLDER, checkpoint__dir=url))
    assert ended.code == 0 and "resuming from step 9," in ended.err, ended
    assert verify(f"{url}/step-000000014") == final_checksum(trained)
    assert make_store(url).quarantined() == []
