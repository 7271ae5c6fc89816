"""Tests of `meseta config`: lists, one key, a section, and whole files that `meseta train` accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meseta.config.keys import all_keys, example_config
from meseta.config.models import MODEL_NAMES
from source_tree import ROOT

Output = Callable[..., str]
README = (ROOT / "README.md").read_text()


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
    assert "there is no example 'x'" in error_of("config", "--example", "x")


def test_train_takes_an_example(output_of: Output, tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "dlrm.yaml").write_text(output_of("config", "--example", "dlrm"))
    run = tmp_path / "run"
    output_of("train", tmp_path / "dlrm.yaml", f"data.dir={tiny}", f"run_dir={run}", "train.max_steps=1")
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 1


def test_example_files_are_printed_and_all_names_are_listed(output_of: Output) -> None:
    for name in ("main", "papers", "everything", "models/dhen"):
        assert output_of("config", "--example", name) == (ROOT / f"examples/configs/{name}.yaml").read_text()
    # A model's name means the config with all its keys, although a file for the sizes of its paper has that name too.
    assert output_of("config", "--example", "dhen") == example_config("dhen")
    names = [line for line in output_of("config", "--example", "list").splitlines() if re.fullmatch(r"[\w/]+", line)]
    files = (path.relative_to(ROOT / "examples").with_suffix("") for path in (ROOT / "examples").rglob("*.yaml"))
    of_files = {path.as_posix().removeprefix("configs/") for path in files if path.parts[0] != "quality"}
    assert sorted(names) == sorted({*MODEL_NAMES, *of_files}) and {"main", "papers", "everything"} < set(names)


def test_train_takes_the_name_of_an_example_unless_a_file_has_it(
    output_of: Output, error_of: Output, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dlrm").mkdir()  # A folder is no config.
    output_of("train", "dlrm", f"data.dir={tiny}", "run_dir=run", "train.max_steps=1")
    assert json.loads((tmp_path / "run/summary.json").read_text())["num_steps"] == 1
    (tmp_path / "papers").write_text("run_dir: run\nmodel: {nme: fm}\n")
    assert "unknown key 'model.nme'" in error_of("train", "papers")
    assert "No such file or directory; `meseta config --example list` lists" in error_of("train", "dlmr")
    assert "No such file or directory; `meseta config" in error_of("train", "schemas/clicks")
    assert error_of("train", "dlrm.yaml").endswith("No such file or directory")


def test_the_schema_fits_the_log_of_readme(output_of: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = (block for block in README.split("```python\n") if "clicks.csv" in block.partition("```")[0])
    exec(program.partition("```")[0], {})
    (tmp_path / "schema.yaml").write_text(output_of("config", "--example", "schemas/clicks"))
    output_of("prepare", "clicks.csv", "--out", "data", "--schema", "schema.yaml")
    features = json.loads((tmp_path / "data/dataset.json").read_text())
    assert {"hour_x_item", "price.bucket", "user_id"} <= set(re.findall(r"[\w.]+", json.dumps(features)))
