"""benchmarks/bench_ops.py and bench_e2e.py from the command line."""

import subprocess
import sys
from pathlib import Path

import bench_e2e
import bench_ops
import pytest
from peers import ops
from peers.command import run_command

from meseta.spec import MesetaError
from source_tree import ROOT


@pytest.mark.soak  # tests/docs/test_pages.py runs a similar command
def test_a_quick_run_prints_every_rate_and_saves_none(tmp_path: Path) -> None:
    pytest.importorskip("meseta._C")
    done = subprocess.run(
        [
            sys.executable, ROOT / "benchmarks" / "bench_ops.py", "c", "--quick", "--no-peers", "--threads", "1",
            "--optimizers", "rowwise_adagrad", "--dtypes", "float32", "--out", tmp_path / "r.csv",
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "c: start ours rowwise_adagrad float32" in done.stderr
    [line] = [line for line in done.stdout.splitlines() if "ours rowwise_adagrad float32" in line]
    cells = [cell.strip() for cell in line.strip("│ \n").split("│")]
    assert cells[1] == "1" and all(float(cell.rstrip("%")) >= 0 for cell in cells[2:9])
    assert not (tmp_path / "r.csv").exists()


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Run a command in this process. Returns (exit code or message, standard error)."""
    monkeypatch.setattr(sys, "argv", list(arguments))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with pytest.raises(SystemExit) as left:
        run_command(bench_e2e.main if arguments[0] == "e2e" else bench_ops.main)
    return left.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "b_unif"), "error: bench: configuration 'b_unif' is unknown; did you mean 'b_uni'?"),
        (("ops", "--optimizers", "adma"), "error: bench: optimizer 'adma' is unknown; did you mean 'adam'?"),
        (("ops", "--threads", "1,x"), "error: bench: 'x' must be a whole number of at least 1"),
        (("e2e", "--layouts", "1x0"), "error: bench: '0' must be a whole number of at least 1"),
        (("e2e", "rm3"), "error: bench: configuration 'rm3' is unknown"),
    ],
)
def test_an_unknown_value_is_named(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python prints a message of SystemExit to standard error and exits with code 1.
    text, _ = run(monkeypatch, capsys, *arguments, "--no-peers")
    assert isinstance(text, str) and text.startswith(message) and "\n" not in text


def test_a_number_of_rounds_is_positive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(monkeypatch, capsys, "ops", "--rounds", "0")
    assert code == 2 and printed.splitlines()[-1].endswith("argument --rounds: '0' must be at least 1")


def test_a_failed_check_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise MesetaError("bench: our operators are wrong")

    monkeypatch.setattr(ops, "check_operators", refuse)
    monkeypatch.setattr(ops, "measure_operators", lambda *_: pytest.fail("measured wrong operators"))
    assert run(monkeypatch, capsys, "ops", "c", "--quick", "--no-peers")[0] == "error: bench: our operators are wrong"
