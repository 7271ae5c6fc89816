"""A run folder that is damaged, full or in use: refused with the way on, and never left half-written."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bad_input.cases import change_value
from bad_input.commands import run_here, tree
from meseta.spec import MesetaError
from meseta.train.lock import FolderLock
from small_run import environment, final_checksum, metrics, settings, train, write_config

EVERY_4 = {"checkpoint__every_steps": 4, "checkpoint__keep_last": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A folder with a finished run of 14 steps and checkpoints of steps 8, 12 and 14; tests take a copy."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(tiny, folder / "run", **EVERY_4))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("dense.safetensors", cut),
        ("dense.safetensors", Path.unlink),
        ("tables/user/block-00000.arrow", flip),
        ("tables/user/block-00000.arrow", Path.unlink),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_offer_works(
    tiny: Path, trained: Path, run: Path, name: str, harm: Callable[[Path], None]
) -> None:
    """`train` and `eval` name the damaged file and the older checkpoint; the command they offer gives the same run."""
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
            f"{str(older)!r} is whole, and the same command takes it after `mv {newest} {newest}.damaged`"
        )
        assert tree(run) == before
    os.rename(newest, f"{newest}.damaged")
    ended = run_here("train", config)
    assert ended.code == 0 and "going on from step 12" in ended.err
    assert final_checksum(run) == final_checksum(trained)


def test_no_older_one_is_whole(tiny: Path, run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        cut(path / "dense.safetensors")
    ended = run_here("train", write_config(run.parent / "c.yaml", settings(tiny, run)))
    assert ended.code == 1 and ended.err.strip().endswith("use an older one; no older one beside it is whole")
    assert len(ended.err.splitlines()) == 1


def test_inspecting_a_run_does_not_pass_over_damage(run: Path) -> None:
    cut(run / "checkpoints/step-000000014/dense.safetensors")
    ended = run_here("checkpoint", "verify", run)
    assert ended.code == 1 and "step-000000014/dense.safetensors' must have" in ended.err


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the system refuses the write, as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit_bytes", [0, 3000, 6000, 12_000, 20_000])
def test_a_full_disk_leaves_whole_files(tiny: Path, trained: Path, tmp_path: Path, limit_bytes: int) -> None:
    """At any moment of a run: one line, whole files only, and with room again the run ends with the same bits."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run, **EVERY_4))
    with file_limit(limit_bytes):
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
    with file_limit(limit_bytes):
        ended = run_here("predict", run, "--out", run / "p.parquet")
    assert ended.code == 1 and ended.out == ""
    [line] = ended.err.splitlines()
    assert re.match(r"error: predictions .*p.parquet' cannot be written: .*; choose another", line), line
    assert tree(run) == before


def test_predictions_that_stop_on_the_way_leave_nothing(tiny: Path, run: Path) -> None:
    """An id outside its table, in the last of three batches."""
    data = Path(shutil.copytree(tiny, run.parent / "data"))
    change_value(data, "user", 270, 412, "test/part-00000.parquet")
    before = tree(run.parent)
    ended = run_here("predict", run, "--out", run / "p.parquet", "--data", data)
    assert ended.code == 1 and "id 412 from feature 'user', sample 10, is outside 0..299" in ended.err
    assert tree(run.parent) == before


def test_the_second_run_in_a_folder_is_refused(tiny: Path, run: Path) -> None:
    """While a process holds the lock; when that is killed, nothing needs to be cleaned up."""
    config = write_config(run.parent / "c.yaml", settings(tiny, run, **EVERY_4, train__epochs=2))
    program = f"""
from pathlib import Path
from meseta.train.lock import FolderLock
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


def test_a_refused_run_gives_the_lock_back(tiny: Path, run: Path) -> None:
    """In one process, as a notebook does it: the next run finds the folder free."""
    with pytest.raises(MesetaError, match="embedding_dim"):
        train(settings(tiny, run, **EVERY_4, model__embedding_dim=8))
    with pytest.raises(MesetaError, match="beyond"):
        train(settings(tiny, run, **EVERY_4, train__max_steps=3))
    assert not (run / ".lock").exists()
    train(settings(tiny, run, **EVERY_4))
