"""Tests of `meseta train` in a folder with failing reads: one error line and unchanged files, or the bits of an
undisturbed run."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from bad_input.commands import run_here, tree
from checkpoint.simulated import flip_middle
from failing_reads import ERRORS, Read, failing_reads, once
from meseta.checkpoint import failures, latest_complete, list_checkpoints
from meseta.checkpoint.files.paths import QUARANTINE_MARKER, checkpoint_path
from sampling import product, sample
from small_run import final_checksum, settings, train, write_config

STRIDE = 25
"""Stride of the failing reads of one case, from the read that the case names."""
SAVES: dict[str, Any] = {
    "checkpoint__every_steps": 4,
    "checkpoint__keep_last": 3,
    "checkpoint__deltas": "consecutive",
    "checkpoint__background": "never",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A run of 14 steps with checkpoints of steps 8, 12 and 14."""
    folder = tmp_path_factory.mktemp("finished")
    train(settings(tiny, folder / "run", **SAVES))
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A run stopped after 11 steps."""
    folder = tmp_path_factory.mktemp("stopped")
    train(settings(tiny, folder / "run", **SAVES, train__max_steps=11))
    return folder / "run"


def attempt(run: Path, tiny: Path, resume: str, choose: Any) -> tuple[Any, list[Read]]:
    document = settings(tiny, run, **SAVES, checkpoint__resume=resume, train__max_steps=14)
    config = write_config(run.parent / "c.yaml", document)
    with failing_reads(run, choose=choose) as reads:
        ended = run_here("train", config)
    return ended, reads


@pytest.mark.parametrize("case", sample(product(resume=("auto", "older"), first=range(STRIDE)), k=0, seed=1))
def test_each_read_of_a_run_fails_once(
    tmp_path: Path, tiny: Path, finished: Path, stopped: Path, case: dict[str, Any]
) -> None:
    """The remaining files verify. A repeated command ends with the bits of an undisturbed run."""
    number, count = case["first"], 1 << 62
    while number < count:
        for error in ERRORS:
            run = tmp_path / f"{number}-{error}" / "run"
            shutil.copytree(stopped, run)
            if case["resume"] == "older":
                flip_middle(checkpoint_path(run / "checkpoints", 11) / "dense.safetensors")
            ended, reads = attempt(run, tiny, case["resume"], once(number, error))
            note = f"read {number}, error {error}: {reads[number] if number < len(reads) else None}: {ended}"
            try:
                assert ended.code == 0 or len(ended.errors) == 1, note
                if ended.code:
                    assert str(run) in ended.errors[0], note
                    spoiled = {"step-000000011"} if case["resume"] == "older" else set()
                    assert {one.path.name for one in list_checkpoints(run) if one.problem} <= spoiled
                    ended, _ = attempt(run, tiny, case["resume"], lambda read: None)
                assert ended.code == 0, (note, ended)
                assert final_checksum(run) == final_checksum(finished), note
                assert not any(one.problem for one in list_checkpoints(run))
            except BaseException as problem:
                problem.add_note(note)
                raise
            shutil.rmtree(run.parent)
            if number >= len(reads):
                count = len(reads)
                break
        number += STRIDE


def unread(file: Path) -> Any:
    return lambda read: errno.EIO if read.path == str(file) and read.kind == "open" else None


def test_an_unreadable_checkpoint_is_not_quarantined(
    tmp_path: Path, tiny: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'older' repeats the read, then names the manual remedy. 'auto' ends immediately. Neither changes a file."""
    monkeypatch.setattr(failures, "READ_RETRY_WINDOW_S", 0.3)
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    newest = latest_complete(run / "checkpoints")
    assert newest is not None
    before = tree(run)
    ended, reads = attempt(run, tiny, "auto", unread(newest / "manifest.json"))
    opened = [read for read in reads if read.path == str(newest / "manifest.json") and read.kind == "open"]
    text = f"error: checkpoint file '{newest}/manifest.json' cannot be read (Input/output error); run the command again"
    assert ended.code == 1 and ended.errors == [f"{text} when it can be read"] and len(opened) == 1
    ended, reads = attempt(run, tiny, "older", unread(newest / "manifest.json"))
    [line] = ended.errors
    assert ended.code == 1 and line.startswith(text)
    aside = f"set the checkpoint aside with `mv {newest} {newest}.unread`, to resume from an older one"
    assert line.endswith(f"(tried for 0.3 s), or {aside}")
    assert tree(run) == before
    newest.rename(f"{newest}.unread")
    ended, _ = attempt(run, tiny, "older", lambda read: None)
    assert ended.code == 0 and "resuming from step 8," in ended.err
    assert not list(run.rglob(QUARANTINE_MARKER))


@pytest.mark.parametrize("name", ["config.yaml", "dataset.json", "metrics.jsonl", "summary.json"])
def test_a_document_that_cannot_be_read_is_not_replaced(tmp_path: Path, tiny: Path, stopped: Path, name: str) -> None:
    """The config may name another model, or a URL of checkpoints."""
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    before = tree(run)
    ended, _ = attempt(run, tiny, "auto", unread(run / name))
    [line] = ended.errors
    assert ended.code == 1 and name in line and "Input/output error" in line
    assert tree(run) == before


def test_list_tells_unread_from_damaged(stopped: Path) -> None:
    newest = latest_complete(stopped / "checkpoints")
    assert newest is not None
    with failing_reads(stopped, choose=unread(newest / "manifest.json")):
        ended = run_here("checkpoint", "list", stopped)
    assert ended.code == 1
    assert f"{newest}  not read: checkpoint file '{newest}/manifest.json' cannot be read" in ended.out
