"""Tests of every command that writes, on twenty disks that are too small: one error line, and no partial output."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bad_input.commands import run_here, small_files, tree
from meseta import checkpoint
from sampling import product, sample
from small_run import metrics, settings, train, write_config

Disk = AbstractContextManager[None]
NUM_SIZES = 20
COMMANDS = {
    "safetensors": "checkpoint export {run} --out {disk}/new --states",
    "numpy": "checkpoint export {run} --out {disk}/new --format numpy",
    "torch-export": "checkpoint export {run} --out {disk}/new --format torch-export",
    "onnx": "checkpoint export {run} --out {disk}/new --format onnx",
    "predict": "predict {run} --out {disk}/new.parquet --split train",
    "predict-data": "predict {run} --data {log} --out {disk}/new.csv",
    "like": "prepare {log} --like {run} --out {disk}/new",
    "report": "report {run} --out {disk}/new.html",
    "stats": "data stats {data} --html {disk}/new.html",
    "prepare": "prepare {log} --out {disk}/new",
    "vocabulary": "prepare {log} --out {disk}/new --vocabulary --min-count 1 --force",
    "synth": "data synth --out {disk}/new --rows 3000 --files 3",
    "gzip": "data synth --out {disk}/new --rows 3000 --files 2 --gzip --probabilities",
}


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Context manager that mounts a file system of this size over `folder`, with the files of the folder."""
    pages = -(-num_bytes // resource.getpagesize())
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_blocks={max(pages, 1)}", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount file systems, and not everywhere")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def places(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, its data, and the log from which the data were prepared."""
    run = tmp_path_factory.mktemp("run") / "run"
    train(settings(tiny, run, train__max_steps=8, data__labels=["label"]))
    return {"run": run, "data": tiny, "log": tiny.parent / "tiny.parquet"}


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="session")
def needs(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[int]]:
    """`needs(command)`: sizes of the files that it writes if the disk is large enough."""
    known: dict[str, list[int]] = {}

    def get(command: str) -> list[int]:
        if command not in known:
            disk = tmp_path_factory.mktemp("large")
            ended = run_here(*COMMANDS[command].format(disk=disk, **places).split())
            assert ended.code == 0, ended.err
            known[command] = sizes(disk)
        return known[command]

    return get


@pytest.mark.parametrize(
    "case", sample(product(command=list(COMMANDS), size=range(NUM_SIZES), kind=["disk", "files"]), k=5, seed=5)
)
def test_a_full_disk(
    places: dict[str, Path], needs: Callable[[str], list[int]], tmp_path: Path, case: dict[str, Any]
) -> None:
    files, share = needs(case["command"]), case["size"] / NUM_SIZES
    words = COMMANDS[case["command"]].format(disk=tmp_path, **places).split()
    before = {name: tree(path) for name, path in places.items() if path.is_dir()}
    disk: Disk
    if case["kind"] == "files":
        limit = int(max(max(files) * share, 1))
        disk = small_files(limit)
    else:  # The size of a disk is rounded up to pages.
        limit = int(min(sum(files) * share, max(sum(files) - mmap.PAGESIZE, 0)))
        disk = small_disk(tmp_path, limit)
    with disk:
        ended = run_here(*words)
        assert ended.code == 1, (limit, files)
        check_one_line(ended.err)
        assert tree(tmp_path) == {}
    assert {name: tree(path) for name, path in places.items() if path.is_dir()} == before


def check_one_line(err: str) -> None:
    lines = [line for line in err.splitlines() if not re.match(r"test at |.*(━|rows/s| rows -| rows in )", line)]
    assert len(lines) == 1 and re.match(r"error: .*(No space left on device|File too large|os error)", lines[0]), err


@pytest.mark.parametrize("case", sample(product(size=range(NUM_SIZES), board=[False, True]), k=2, seed=1))
def test_training_on_a_full_disk(tiny: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    """Files written before the disk was full stay complete."""
    folder = tmp_path / "disk"
    folder.mkdir()
    run = folder / "run"
    changes = {"train__max_steps": 8, "checkpoint__every_steps": 2, "checkpoint__keep_last": 3}
    if case["board"]:
        pytest.importorskip("tensorboard")
    document = settings(tiny, run, **changes, train__loggers=["tensorboard"] * case["board"], train__log_every_steps=1)
    config = write_config(tmp_path / "c.yaml", document)
    with small_disk(folder, 5_000 + 20_000 * case["size"]):
        ended = run_here("train", config)
        assert ended.code == 1, sum(sizes(folder))
        check_one_line(ended.err)
        assert not [path for path in folder.rglob("*") if path.name.startswith(".") or ".tmp" in path.name]
        for path in folder.rglob("*.json"):
            json.loads(path.read_text())
        for whole in (run / "checkpoints").iterdir() if run.exists() else ():
            checkpoint.verify(whole)
        if (run / "metrics.jsonl").exists():
            assert (run / "metrics.jsonl").read_text().count("\n") == len(metrics(run))
