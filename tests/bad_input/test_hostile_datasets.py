"""Tests that the files of dataset.json must be regular files inside the folder. Other datasets are refused in one
line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bad_input.commands import run_here, tree, within
from bad_input.hostile import DESCRIPTIONS
from sampling import sample
from small_run import settings, write_config

SIZE = 4


@pytest.mark.parametrize("group", sample(range(-(-len(DESCRIPTIONS) // SIZE)), 1, seed=0))
def test_descriptions(tiny: Path, tmp_path: Path, group: int) -> None:
    kinds = list(DESCRIPTIONS.items())[group :: -(-len(DESCRIPTIONS) // SIZE)]
    for number, (kind, change) in enumerate(kinds):
        folder = tmp_path / str(number)
        shutil.copytree(tiny, folder / "data")
        change(folder / "data")
        config = write_config(folder / "c.yaml", settings(folder / "data", folder / "run", train__max_steps=1))
        before = tree(folder)
        for arguments in (["data", "check", folder / "data"], ["data", "stats", folder / "data"], ["train", config]):
            with within(120, f"{kind}: {arguments[0]}"):
                ended = run_here(*arguments)
            what = kind, arguments, ended
            assert ended.code == 1 and "Traceback" not in ended.err, what
            assert len(ended.errors) == 1 or (arguments[1] == "check" and ended.out), what
            assert all(len(line) < 1500 for line in ended.errors), what
            assert tree(folder) == before, what
