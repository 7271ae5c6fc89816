"""Tests of spoiled configs and overrides: the run trains, or one line refuses it. No traceback, hang or partial run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from bad_input.commands import run_here, within
from bad_input.spoil import overrides, spoiled_yaml
from sampling import sample
from small_run import settings

CASES_PER_TEST = 25


def full_settings(data: Path) -> dict:
    """Return a config that uses every section."""
    document = settings(
        data,
        Path("run"),
        seed=3,
        device="cpu",
        plan={"tables": {"*": "table_wise", "user": {"sharding": "table_wise", "ranks": [0]}}},
        checkpoint__every_steps=1,
        checkpoint__keep_last=2,
        train__eval_every_steps=1,
        train__max_steps=2,
        train__early_stopping={"metric": "ne", "patience": 3},
        embedding__schedule={"kind": "polynomial", "warmup_steps": 1},
        embedding__tables={"city": {"optimizer": {"name": "adam", "lr": 0.1}}},
        embedding__id_policy="error",
    )
    document["model"]["name"] = "dlrm"
    del document["num_threads"]  # hundreds of threads do not fit into the memory that `within` leaves
    return document


def check_folder(run_dir: Path) -> None:
    """Check that all files are complete."""
    for path in run_dir.rglob("*"):
        assert not path.name.startswith("."), path
        if path.suffix == ".json":
            json.loads(path.read_text())
    if (run_dir / "metrics.jsonl").exists():
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            json.loads(line)


@pytest.mark.parametrize("seed", sample(range(200), 1, seed=0))
def test_spoiled_configs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(f"config {seed}")
    document = full_settings(tiny)
    codes = []
    for number in range(CASES_PER_TEST):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        text, options = spoiled_yaml(document, draw), overrides(document, draw)
        Path("c.yaml").write_bytes(text)
        with within(120, f"{text!r} {options}"):
            ended = run_here("train", "c.yaml", *options, "train.max_steps=2")
        codes.append(ended.code)
        if ended.code:
            assert ended.code in (1, 2), ended
            assert len([line for line in ended.err.splitlines() if line.startswith("error: ")]) == (ended.code == 1)
            assert ended.err.splitlines()[-1].startswith("error: ") or ended.code == 2, ended
        check_folder(place)
        shutil.rmtree(place)
    assert codes.count(0) < CASES_PER_TEST
