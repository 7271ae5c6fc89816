"""`meseta checkpoint` on a finished run: what it prints, exit codes, one-line errors."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from meseta.checkpoint import verify
from meseta.cli.main import main
from small_run import settings, tiny_data, train

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("list", path)` -> (exit code, standard output, standard error)."""
    handler = signal.getsignal(signal.SIGINT)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meseta", "checkpoint", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = left.value.code
        assert code is None or isinstance(code, int)
        return code or 0, captured.out, captured.err

    yield call
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The directory of a finished run; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(tiny, folder / "run"))
    return folder / "run"


def test_list_inspect_and_verify_name_the_same_model(run: Run, trained: Path) -> None:
    [newest] = sorted((trained / "checkpoints").glob("step-*"))[-1:]
    checksum = verify(newest)
    code, out, _ = run("list", trained, "--json")
    assert code == 0 and json.loads(out)[-1]["checksum"] == checksum
    assert f"model {checksum[:16]}" in run("list", trained)[1]
    code, out, _ = run("inspect", trained, "--json")
    assert code == 0 and json.loads(out)["path"] == str(newest)
    assert checksum in run("inspect", newest)[1]
    code, out, _ = run("verify", trained / "checkpoints")
    assert code == 0 and out.startswith(f"{newest}: whole, ") and out.endswith(f"model {checksum}\n")


def test_damage_is_exit_code_1_and_names_the_file(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    block = sorted((copy / "checkpoints").rglob("block-*.arrow"))[-1]
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    code, _, err = run("verify", copy)
    assert code == 1 and err.startswith(f"error: checkpoint file {str(block)!r}") and err.count("\n") == 1
    block.unlink()
    code, out, _ = run("list", copy)
    assert code == 1 and f"damaged: checkpoint file {str(block)!r}" in out


def test_diff(run: Run, trained: Path, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = run("diff", trained, trained)
    assert code == 0 and out.endswith("hold the same model, bit for bit\n")
    other = tmp_path / "run"
    train({**settings(tiny, other), "seed": 5})
    code, out, _ = run("diff", trained, other)
    assert code == 1 and "rows: " in out and "dense tensor " in out


def test_export(run: Run, trained: Path, tmp_path: Path) -> None:
    code, out, _ = run("export", trained, "--out", tmp_path / "out", "--format", "numpy")
    assert code == 0 and out.startswith(f"{tmp_path / 'out'}: ")
    facts = json.loads(run("inspect", trained, "--json")[1])
    for table in facts["tables"]:
        rows = np.load(tmp_path / "out" / "tables" / table["name"] / "row.npy")
        assert rows.shape == (table["num_embeddings"], table["embedding_dim"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "nowhere"), "is no directory; give the directory of a run"),
        (("verify", "."), "holds no checkpoint"),
        (("diff", "nowhere", "nowhere"), "is no directory"),
    ],
)
def test_wrong_paths_are_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    command, *paths = arguments
    code, out, err = run(command, *(tmp_path / path for path in paths))
    assert (code, out) == (1, "") and words in err and err.count("\n") == 1


def test_an_unknown_format_is_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    code, _, err = run("export", trained, "--out", tmp_path / "out", "--format", "pickle")
    assert code == 1 and "--format 'pickle' is unknown; choose from safetensors, numpy" in err
