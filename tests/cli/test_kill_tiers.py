"""Tests of runs with rows on a disk that are killed, or whose disk is full. They resume with the bits of an undisturbed
run or report the error, and leave no file."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.processes import Command
from cli.test_kill import COMMON, kill_run
from meseta.ops.row_file.scratch_file import SUFFIX
from small_disk import small_disk
from small_run import final_checksum, metrics, settings, train, write_config

CACHE_ROWS = {1: 90, 2: 64}
"""Cache size that holds little more of table 'user' than a batch needs on one rank. Each step reads, evicts and cleans
rows, as records have 3 KB."""
WIDE = {
    **COMMON,
    "model__embedding_dim": 256,
    "model__bottom_mlp": [8, 256],
    "embedding__optimizer": {"name": "adam", "lr": 0.01},
    "checkpoint__background": "always",
}


def document(tiny: Path, run_dir: Path, size: int, tier: str, cache_rows: int | None = None) -> dict[str, Any]:
    """Return the settings of a run whose largest table has this storage, row-wise on two ranks."""
    storage_keys = {} if tier == "hbm" else {"tier": tier, "cache_rows": cache_rows or CACHE_ROWS[size]}
    user = {"sharding": "table_wise" if size == 1 else "row_wise", **storage_keys}
    storage = {"dir": str(run_dir.parent / "scratch")}
    changes = {**WIDE, "plan": {"tables": {"user": user, "*": "table_wise"}}, "storage": storage}
    return settings(tiny, run_dir, **changes)


@pytest.fixture(scope="session")
def resident(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Callable[[int], Path]:
    """Directory of an undisturbed run whose tables are in memory, by number of ranks."""
    runs: dict[int, Path] = {}

    def get(size: int) -> Path:
        if size not in runs:
            folder = tmp_path_factory.mktemp(f"resident-{size}")
            made = document(tiny, folder / "run", size, "hbm")
            if size == 1:
                train(made)
            else:
                Command(folder, "train", write_config(folder / "c.yaml", made), "--nproc", size).succeed()
            runs[size] = folder / "run"
        return runs[size]

    return get


@pytest.mark.soak  # tests/distributed/test_file_storage.py resumes such a run in `make test`
@pytest.mark.parametrize(
    ("size", "seed", "num_kills"),
    [(1, 0, 1), *((size, seed, 5) for size in (1, 2) for seed in range(1, 11))],
)
def test_killed_while_rows_move(
    resident: Callable[[int], Path], tiny: Path, tmp_path: Path, size: int, seed: int, num_kills: int
) -> None:
    """Run 20 cases of 5 kills at moments when rows move. Most steps read, evict and clean some rows."""
    draw = random.Random(f"tiers/{size}/{seed}")
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", document(tiny, run_dir, size, "disk"))
    for number in range(num_kills):
        moment = draw.choice(["training", "saving", "evaluating"])
        kill_run(tmp_path / str(number), (config, "--nproc", size), moment, draw)
    Command(tmp_path / "last", "train", config, "--nproc", size).succeed()
    assert final_checksum(run_dir) == final_checksum(resident(size))
    assert losses(run_dir) == losses(resident(size))
    assert not [*(tmp_path / "scratch").glob(f"*{SUFFIX}")]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run_dir) if line["kind"] == "train"]


@pytest.mark.parametrize("moment", ["pushed out", pytest.param("saved", marks=pytest.mark.soak)])
def test_a_disk_that_fills_up_is_named_on_all_ranks(tiny: Path, tmp_path: Path, moment: str) -> None:
    """The disk is full when rows are evicted, or when a save writes the changed rows of a cache that holds all rows."""
    run_dir = tmp_path / "run"
    made = document(tiny, run_dir, 2, "disk", cache_rows=None if moment == "pushed out" else 150)
    with small_disk(tmp_path / "scratch", "64k"):
        command = Command(tmp_path / "full", "train", write_config(tmp_path / "c.yaml", made), "--nproc", 2)
        assert command.wait() == 1
        [line] = [line for line in command.err.read_text().splitlines() if line.startswith("error:")]
        assert re.fullmatch(
            r"error: .*table 'user', rows \d+\.\.\d+: file '.*scratch/user[^']*'(, byte [\d,]+)?: the file cannot be "
            r"written: No space left on device; free space, or set storage.dir to another disk.*",
            line,
        ), line
        assert command.members() == [] and not [*(tmp_path / "scratch").glob(f"*{SUFFIX}")]
