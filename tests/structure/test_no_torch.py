"""`meseta plan` and `meseta --help` start quickly, because the planner and the layers below it do not import torch.

`meseta doctor` does not import torch either, so that it can report a broken torch. Readers do not, so that they start
quickly and stay small.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import SOURCE

# A fresh interpreter is needed, because import contracts do not see imports inside functions or other packages.
HEAVY = {"torch", "pyarrow", "numpy"}
HEAVY_BY_MODULE = {
    "meseta": HEAVY,
    "meseta.spec": HEAVY,
    "meseta.config": HEAVY,
    "meseta.planner": {"torch", "pyarrow"},  # it computes with arrays
    "meseta.measure.doctor.checks": HEAVY,
    "meseta.data.read.slicing": {"torch"},
    "meseta.data.synth": {"torch"},
    "meseta.data.read.decode": {"torch"},
    "meseta.data.service.server.dispatch_server": {"torch"},
    "meseta.data.service.server.window_reader": {"torch"},
}


@pytest.mark.parametrize(("module", "heavy"), HEAVY_BY_MODULE.items())
def test_no_torch_is_loaded(module: str, heavy: set[str]) -> None:
    program = f"import {module}, sys; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


MODEL = "format: meseta.workload/1\nbatch_size: 64\ntables: {user: {num_embeddings: 9, embedding_dim: 8, copies: 3}}\n"
SLOW_TO_LOAD = ["torch", "pyarrow", "scipy", "pandas", "matplotlib"]


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["--help"], "train"),
        (["plan", "create", "--help"], "--topology"),
        (["plan", "model.yaml", "--topology", "machines.yaml", "--html", "plan.html", "--out", "plan.json"], "user_2"),
    ],
)
def test_commands_that_start_at_once(command: list[str], printed: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "machines.yaml").write_text("devices_per_host: 2\ndevice: h100\nhbm_bytes: 80000000000\n")
    program = (
        f"import sys; sys.argv = {['meseta', *command]}\n"
        "from meseta.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print([name for name in {SLOW_TO_LOAD} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(SOURCE.parent)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert printed in run.stdout and run.stdout.splitlines()[-1] == "[]"
