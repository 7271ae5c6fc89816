"""Tests of run folders that are damaged, full or in use: an error names the remedy, and no file is incomplete."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bad_input.cases import change_value
from bad_input.commands import run_here, small_files, tree, within
from checkpoint.simulated import flip_middle
from meseta.ops.row_file.scratch_file import ScratchFile, remove_leftovers
from meseta.spec import MesetaError
from meseta.system.locks import FolderLock
from sampling import product, sample
from small_run import environment, final_checksum, metrics, settings, train, write_config

EVERY_4 = {"checkpoint__every_steps": 4, "checkpoint__keep_last": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Folder with a finished run of 14 steps and checkpoints of steps 8, 12 and 14. Tests take a copy."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(tiny, folder / "run", **EVERY_4))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("dense.safetensors", cut),
        ("dense.safetensors", Path.unlink),
        ("tables/user/block-00000.arrow", flip_middle),
        ("tables/user/block-00000.arrow", Path.unlink),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_offer_works(
    tiny: Path, trained: Path, run: Path, name: str, harm: Callable[[Path], None]
) -> None:
    """`train` and `eval` name the damaged file and the older checkpoint. The offered command gives the same run."""
    newest, older = (run / "checkpoints" / f"step-0000000{step}" for step in ("14", "12"))
    harm(newest / name)
    config = write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4))
    before = tree(run)
    commands = [("train", config), ("eval", run), ("predict", run, "--out", run / "p.parquet")]
    for arguments in commands[:2] if harm is cut else commands[:1]:
        ended = run_here(*arguments)
        assert ended.code == 1 and ended.out == ""
        [line] = ended.err.splitlines()
        assert line.startswith("error: checkpoint ") and str(newest) in line and name in line
        assert line.endswith(
            f"{str(older)!r} is intact; the same command resumes from it after `mv {newest} {newest}.damaged`"
        )
        assert tree(run) == before
    os.rename(newest, f"{newest}.damaged")
    ended = run_here("train", config)
    assert ended.code == 0 and "resuming from step 12" in ended.err
    assert final_checksum(run) == final_checksum(trained)


def test_no_older_one_is_whole(tiny: Path, run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        cut(path / "dense.safetensors")
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run)))
    assert ended.code == 1 and ended.err.strip().endswith(
        "use an older one; no older checkpoint in its folder is intact"
    )
    assert len(ended.err.splitlines()) == 1


def test_inspecting_a_run_does_not_pass_over_damage(run: Path) -> None:
    cut(run / "checkpoints/step-000000014/dense.safetensors")
    ended = run_here("checkpoint", "verify", run)
    assert ended.code == 1 and "step-000000014/dense.safetensors' must have" in ended.err


@pytest.mark.parametrize("limit_bytes", [0, 3000, 6000, 12_000, 20_000])
def test_a_full_disk_leaves_whole_files(tiny: Path, trained: Path, tmp_path: Path, limit_bytes: int) -> None:
    """One line reports the error, files are complete, and with more space the run ends with the same bits."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run, **EVERY_4))
    with small_files(limit_bytes):
        ended = run_here("train", config)
    assert ended.code == 1 and ended.out == ""
    [line] = [line for line in ended.err.splitlines() if not line.startswith(("step ", "test at "))]
    assert re.match(r"error: .*cannot be written.*: File too large", line), line
    assert not list(run.rglob(".*"))
    lines = metrics(run) if (run / "metrics.jsonl").exists() else []
    assert [line["step"] for line in lines if line["kind"] == "train"] == [4, 8, 12, 14][: len(lines)]
    ended = run_here("train", config)
    assert ended.code == 0, ended.err
    assert final_checksum(run) == final_checksum(trained)


@pytest.mark.parametrize("limit_bytes", [0, 2000])
def test_predictions_on_a_full_disk(run: Path, limit_bytes: int) -> None:
    before = tree(run)
    with small_files(limit_bytes):
        ended = run_here("predict", run, "--out", run / "p.parquet")
    assert ended.code == 1 and ended.out == ""
    [line] = ended.err.splitlines()
    assert re.match(r"error: predictions .*p.parquet' cannot be written: .*; choose another", line), line
    assert tree(run) == before


def test_predictions_that_stop_on_the_way_leave_nothing(tiny: Path, run: Path) -> None:
    """An id outside its table is in the last of three batches."""
    data = Path(shutil.copytree(tiny, run.parent / "data"))
    change_value(data, "user", 270, 412, "test/part-00000.parquet")
    before = tree(run.parent)
    ended = run_here("predict", run, "--out", run / "p.parquet", "--data", data)
    assert ended.code == 1 and "id 412 from feature 'user', sample 10, is outside 0..299" in ended.err
    assert tree(run.parent) == before


def test_the_second_run_in_a_folder_is_refused(tiny: Path, run: Path) -> None:
    """After a process with the lock is killed, nothing must be cleaned up."""
    config = write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4, train__epochs=2))
    program = f"""
from pathlib import Path
from meseta.system.locks import FolderLock
from meseta.ops.row_file.scratch_file import ScratchFile, remove_leftovers
FolderLock(Path({str(run)!r})).acquire()
print(flush=True)
input()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    assert holder.stdin and holder.stdout
    holder.stdout.readline()
    before = tree(run)
    ended = run_here("train", config)
    assert ended.code == 1 and ended.out == ""
    [line] = ended.err.splitlines()
    assert re.match(rf"error: run_dir '.*' is in use: process {holder.pid} on .* trains in it; wait until it has", line)
    assert tree(run) == before
    holder.kill()
    holder.wait()
    holder.stdin.close(), holder.stdout.close()
    assert (run / ".lock").exists()
    assert run_here("train", config).code == 0
    assert not (run / ".lock").exists()


def test_a_lock_is_kept_by_one_object_and_given_back(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(MesetaError, match="is in use"):
        second.acquire()
    first.release()
    second.acquire()
    with pytest.raises(MesetaError, match="is in use"):
        first.acquire()
    second.release()
    second.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The state of the lock is unknown, so no run continues and no file is removed."""
    scratch = ScratchFile(tmp_path, "mine", "table 'user'")

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        FolderLock(tmp_path).acquire()
    assert remove_leftovers(tmp_path) == [] and scratch.path.exists()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MesetaError, match="table 'item': cannot create a row file in"):
        ScratchFile(tmp_path, "other", "table 'item'")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The run continues, and no file is removed as a leftover."""
    scratch = ScratchFile(tmp_path, "mine", "table 'user'")

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert remove_leftovers(tmp_path) == [] and scratch.path.exists()


def test_a_refused_run_gives_the_lock_back(tiny: Path, run: Path) -> None:
    """A notebook runs both in one process, and the next run can lock the folder."""
    with pytest.raises(MesetaError, match="embedding_dim"):
        train(settings(tiny, run, **EVERY_4, model__embedding_dim=8))
    with pytest.raises(MesetaError, match="beyond"):
        train(settings(tiny, run, **EVERY_4, train__max_steps=3))
    assert not (run / ".lock").exists()
    train(settings(tiny, run, **EVERY_4))


LIMIT_S = 60
"""Timeout of a command that ends within a second if it does not hang."""
OUTSIDE = "outside.txt"
"""A file outside the run, to which a link in an untrusted run may point."""


def replaced_by(content: bytes) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        clear(path)
        path.write_bytes(content)

    return replace


def clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def half(path: Path) -> None:
    content = path.read_bytes() if path.is_file() else b""
    replaced_by(content[: len(content) // 2])(path)


def fifo(path: Path) -> None:
    clear(path)
    os.mkfifo(path)


def folder(path: Path) -> None:
    clear(path)
    (path / "inner").mkdir(parents=True)


def link(path: Path) -> None:
    clear(path)
    path.symlink_to(path.parents[1] / OUTSIDE)


def link_to_itself(path: Path) -> None:
    clear(path)
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    """Write a sparse file that is longer than any document."""
    clear(path)
    path.touch()
    os.truncate(path, 40 << 20)


HARMS: dict[str, Callable[[Path], None]] = {
    "missing": clear,
    "empty": replaced_by(b""),
    "half": half,
    "binary": replaced_by(random.Random(0).randbytes(4000)),
    "fifo": fifo,
    "folder": folder,
    "link": link,
    "link_to_itself": link_to_itself,
    "huge": huge,
    "list": replaced_by(b"[1, 2, 3]\n"),
    "wrong_types": replaced_by(b'{"kind": "eval", "step": "x", "test": {"auc": []}, "tables": 3, "num_ranks": {}}\n'),
    "nan": replaced_by(b'{"kind": "train", "step": NaN, "num_samples": Infinity, "num_ranks": NaN, "tables": {}}\n'),
    "deep": replaced_by(b"[" * 100_000),
    "a_date_that_is_none": replaced_by(b"seed: 2020-13-01\n"),
}
NAMES = (
    "config.yaml", "dataset.json", "plan.json", "environment.json", "metrics.jsonl", "summary.json", "report.html",
    "timeline.json",
    ".lock", "checkpoints", "tensorboard", "checkpoints/step-000000099", "checkpoints/.tmp-mine", ".config.yaml.tmp",
)  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "c.yaml"),
    "report": ("report", "run"),
    "compare": ("report", "run", "other", "--out", "page.html"),
    "check": ("plan", "check", "run"),
    "eval": ("eval", "run", "--best"),
    "predict": ("predict", "run", "--out", "p.parquet"),
    "list": ("checkpoint", "list", "run"),
    "verify": ("checkpoint", "verify", "run"),
}
WRITTEN = {"page.html", "p.parquet", "run/report.html"}


@pytest.mark.parametrize("case", sample(product(name=NAMES, harm=list(HARMS), command=list(COMMANDS)), k=8, seed=1))
def test_an_untrusted_file_in_a_run_is_refused_in_one_line_or_left_alone(
    case: dict[str, str], tiny: Path, trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = run.parent
    monkeypatch.chdir(home)
    (home / OUTSIDE).write_text("mine\n")
    (home / "other").symlink_to(trained)
    write_config(
        home / "c.yaml",
        settings(tiny, run, **EVERY_4, train__loggers=["tensorboard"] * (case["name"] == "tensorboard")),
    )
    HARMS[case["harm"]](run / case["name"])
    before = tree(home)
    with within(LIMIT_S, str(case)):
        ended = run_here(*COMMANDS[case["command"]])
    assert ended.code in (0, 1)
    faults = [line for line in ended.out.splitlines() if "damaged: " in line] if case["command"] == "list" else []
    assert len(ended.errors) + len(faults) == ended.code, ended
    assert (home / OUTSIDE).read_text() == "mine\n"
    if case["command"] != "train":
        left = {name: content for name, content in tree(home).items() if name not in WRITTEN}
        assert left == {name: content for name, content in before.items() if name not in WRITTEN}
    elif case["name"].startswith("checkpoints/") and case["harm"] != "missing":
        assert os.path.lexists(run / case["name"])


@pytest.mark.parametrize("harm", [link, link_to_itself])
def test_no_report_is_written_through_a_link(run: Path, harm: Callable[[Path], None]) -> None:
    """A run may have a link in place of its report. A link that the user names is followed."""
    (run.parent / OUTSIDE).write_text("mine\n")
    harm(run / "report.html")
    before = tree(run.parent)
    ended = run_here("report", run)
    assert ended.code == 1 and tree(run.parent) == before
    place = repr(str(run / "report.html"))
    expected = f"error: report: {place} is not a regular file; move it, or set another path with --out\n"
    assert ended.err == expected


@pytest.mark.parametrize(
    "spoiled", [b"\xff\x00rubbish", b'{"kind": "eval", "step": "x"}', b"[" * 9999, b'{"kind": [], "step": 3}']
)
def test_a_spoiled_line_of_metrics_is_named_and_stays(spoiled: bytes, tiny: Path, trained: Path, run: Path) -> None:
    """The resumed run has the same metrics, and an incomplete last line is removed."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], spoiled, *lines[1:], b'{"kind": "train", "st']))
    shutil.rmtree(run / "checkpoints/step-000000014")
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4)))
    assert ended.code == 0
    [note] = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert note == f"note: {str(path)!r}: 1 of its lines cannot be read (line 2) and are left alone"
    after = path.read_bytes().splitlines()
    assert after.pop(1) == spoiled and len(after) == len(lines)
    assert final_checksum(run) == final_checksum(trained)


def test_strange_names_among_checkpoints_are_named_and_left_alone(tiny: Path, trained: Path, run: Path) -> None:
    parent = run / "checkpoints"
    for name in ("notes.txt", "step-000000099", ".tmp-mine", ".old-step-x"):
        (parent / name).write_text("mine")
    os.mkfifo(parent / "step-000000100")
    (parent / ".tmp-notes").mkdir()
    names = ["notes.txt", "step-000000099", ".tmp-mine", ".old-step-x", "step-000000100", ".tmp-notes"]
    shutil.rmtree(parent / "step-000000014")
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4)))
    assert ended.code == 0
    notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert sorted(notes) == sorted(f"note: {str(parent / n)!r} is no checkpoint and is ignored" for n in names)
    assert all((parent / name).exists() for name in names)
    assert final_checksum(run) == final_checksum(trained)
    listed = run_here("checkpoint", "list", run)
    assert listed.code == 0 and listed.out.count("  not a checkpoint\n") == len(names)


def test_a_file_in_the_place_of_a_checkpoint_is_not_replaced(tiny: Path, run: Path) -> None:
    path = run / "checkpoints/step-000000014"
    shutil.rmtree(path)
    path.write_text("mine")
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4)))
    assert ended.code == 1 and path.read_text() == "mine"
    assert "step-000000014" in ended.errors[0] and "not a folder" in ended.errors[0]


def test_a_lock_that_is_a_link_is_not_written_through(tiny: Path, run: Path) -> None:
    (run.parent / OUTSIDE).write_text("mine")
    (run / ".lock").symlink_to(run.parent / OUTSIDE)
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4)))
    assert ended.code == 1 and len(ended.errors) == 1
    assert (run.parent / OUTSIDE).read_text() == "mine"
