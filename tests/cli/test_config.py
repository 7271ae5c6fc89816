"""Tests of `meseta config`: lists, one key, a section, and whole files that `meseta train` accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meseta.config.keys import all_keys

Output = Callable[..., str]


def test_every_key_is_listed_with_kind_default_and_meaning(output_of: Output) -> None:
    lines = output_of("config").splitlines()
    heads = [line.split(":")[0] for line in lines if line and not line.startswith(" ")]
    keys = all_keys()
    assert [head for head in heads if head in {key.path for key in keys}] == [key.path for key in keys]
    assert "`" not in "".join(line for line in lines if line.startswith("train."))
    at = lines.index("train.batch_size: integer ≥ 1, < 2,147,483,648; default 2048")
    assert lines[at + 1] == "    Samples of a global batch, over all ranks."
    assert "run_dir: path; must be given" in lines and "train.max_steps: integer ≥ 1, < 2^63; default none" in lines


def test_lines_are_as_wide_as_the_terminal(output_of: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, limit in (("60", 60), ("400", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        meanings = [line for line in output_of("config", "model").splitlines() if line.startswith("    ")]
        assert limit - 20 < max(map(len, meanings)) <= limit


def test_errors_are_one_line(error_of: Output) -> None:
    assert "did you mean 'train.batch_size'" in error_of("config", "train.batchsize")
    assert "omit the key 'train'" in error_of("config", "train", "--example", "dlrm")
    assert "there is no model 'x'" in error_of("config", "--example", "x")


def test_train_takes_an_example(output_of: Output, tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "dlrm.yaml").write_text(output_of("config", "--example", "dlrm"))
    run = tmp_path / "run"
    output_of("train", tmp_path / "dlrm.yaml", f"data.dir={tiny}", f"run_dir={run}", "train.max_steps=1")
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 1
