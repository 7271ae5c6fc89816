"""`meseta bench` from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from meseta.cli.main import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meseta.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_quick_run_shows_every_figure_and_keeps_none(tmp_path: Path) -> None:
    pytest.importorskip("meseta._C")
    done = run(
        "ops", "c", "--quick", "--no-peers", "--threads", "1", "--optimizers", "rowwise_adagrad", "--dtypes", "float32",
        "--out", str(tmp_path / "r.csv"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "c: start ours rowwise_adagrad float32" in done.stderr
    [line] = [line for line in done.stdout.splitlines() if "ours rowwise_adagrad float32" in line]
    cells = [cell.strip() for cell in line.strip("│ \n").split("│")]
    assert cells[1] == "1" and all(float(cell.rstrip("%")) >= 0 for cell in cells[2:9])
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "b_unif"), "bench: configuration 'b_unif' is unknown; did you mean 'b_uni'?"),
        (("ops", "--optimizers", "adma"), "bench: optimizer 'adma' is unknown; did you mean 'adam'?"),
        (("ops", "--threads", "1,x"), "bench: 'x' must be a whole number of at least 1"),
        (("e2e", "--layouts", "1x0"), "bench: '0' must be a whole number of at least 1"),
        (("e2e", "rm3"), "bench: configuration 'rm3' is unknown"),
    ],
)
def test_what_is_not_known_is_named(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meseta", "bench", *arguments, "--no-peers"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1 and message in capsys.readouterr().err


def test_a_red_gate_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from meseta.measure.bench import ops
    from meseta.spec import MesetaError

    def refuse(*_: object) -> None:
        raise MesetaError("bench: our operators are wrong")

    monkeypatch.setattr(ops, "check_operators", refuse)
    monkeypatch.setattr(ops, "measure_operators", lambda *_: pytest.fail("measured all the same"))
    monkeypatch.setattr(sys, "argv", ["meseta", "bench", "ops", "c", "--quick", "--no-peers"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1 and capsys.readouterr().err == "error: bench: our operators are wrong\n"
