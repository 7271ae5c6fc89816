"""Tests of `meseta checkpoint` on a finished run: output, exit codes and one-line errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meseta.checkpoint import verify
from small_run import settings, train

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Directory of a finished run. Tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(tiny, folder / "run"))
    return folder / "run"


def test_list_inspect_and_verify_name_the_same_model(run: Run, trained: Path) -> None:
    [newest] = sorted((trained / "checkpoints").glob("step-*"))[-1:]
    checksum = verify(newest)
    code, out, _ = run("checkpoint", "list", trained, "--json")
    assert code == 0 and json.loads(out)[-1]["checksum"] == checksum
    assert f"model {checksum[:16]}" in run("checkpoint", "list", trained)[1]
    code, out, _ = run("checkpoint", "inspect", trained, "--json")
    assert code == 0 and json.loads(out)["path"] == str(newest)
    assert checksum in run("checkpoint", "inspect", newest)[1]
    code, out, _ = run("checkpoint", "verify", trained / "checkpoints")
    assert code == 0 and out.startswith(f"{newest}: intact, ") and out.endswith(f"model {checksum}\n")


def test_urls(run: Run, trained: Path, tmp_path: Path) -> None:
    [newest] = sorted((trained / "checkpoints").glob("step-*"))[-1:]
    url, checksum = f"file://{trained}/checkpoints", verify(newest)
    code, out, _ = run("checkpoint", "list", url, "--json")
    assert code == 0 and json.loads(out)[-1]["checksum"] == checksum
    assert f"model {checksum[:16]}" in run("checkpoint", "list", url)[1]
    assert checksum in run("checkpoint", "verify", f"{url}/{newest.name}")[1]
    assert run("checkpoint", "diff", url, trained)[0] == 0
    assert run("checkpoint", "inspect", url)[0] == 0
    assert run("checkpoint", "export", url, "--out", tmp_path / "out")[0] == 0
    code, _, err = run("checkpoint", "verify", "memory://nothing")
    assert code == 1 and err == "error: checkpoint 'memory://nothing' holds no checkpoint; check the URL\n"


def test_damage_is_exit_code_1_and_names_the_file(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    block = sorted((copy / "checkpoints").rglob("block-*.arrow"))[-1]
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    code, _, err = run("checkpoint", "verify", copy)
    assert code == 1 and err.startswith(f"error: checkpoint file {str(block)!r}") and err.count("\n") == 1
    block.unlink()
    code, out, _ = run("checkpoint", "list", copy)
    assert code == 1 and f"damaged: checkpoint file {str(block)!r}" in out


def test_diff(run: Run, trained: Path, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = run("checkpoint", "diff", trained, trained)
    assert code == 0 and out.endswith("hold the same model, bit for bit\n")
    other = tmp_path / "run"
    train({**settings(tiny, other), "seed": 5})
    code, out, _ = run("checkpoint", "diff", trained, other)
    assert code == 1 and "rows: " in out and "dense tensor " in out


def test_export(run: Run, trained: Path, tmp_path: Path) -> None:
    code, out, _ = run("checkpoint", "export", trained, "--out", tmp_path / "out", "--format", "numpy")
    assert code == 0 and out.startswith(f"{tmp_path / 'out'}: ")
    facts = json.loads(run("checkpoint", "inspect", trained, "--json")[1])
    for table in facts["tables"]:
        rows = np.load(tmp_path / "out" / "tables" / table["name"] / "row.npy")
        assert rows.shape == (table["num_embeddings"], table["embedding_dim"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "nowhere"), "is not a folder; choose a run folder"),
        (("verify", "."), "holds no checkpoint"),
        (("diff", "nowhere", "nowhere"), "is not a folder"),
    ],
)
def test_wrong_paths_are_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    command, *paths = arguments
    code, out, err = run("checkpoint", command, *(tmp_path / path for path in paths))
    assert (code, out) == (1, "") and words in err and err.count("\n") == 1


def test_an_unknown_format_is_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    code, _, err = run("checkpoint", "export", trained, "--out", tmp_path / "out", "--format", "pickle")
    assert code == 1 and "--format 'pickle' is unknown; choose from safetensors, numpy" in err
