"""`meseta plan` and `meseta --help` start quickly: nothing from the planner down loads torch, even indirectly.

`meseta doctor` does not either: it has to tell when torch is broken.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import SOURCE

# Checked in a fresh interpreter: an import contract does not see imports inside functions or other packages.
TORCH_FREE = ["meseta", "meseta.spec", "meseta.config", "meseta.planner", "meseta.measure.doctor.examine"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_torch_is_loaded(module: str) -> None:
    heavy = (
        {"torch", "pyarrow"} if module == "meseta.planner" else {"torch", "pyarrow", "numpy"}
    )  # it reckons in arrays
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
HEAVY = ["torch", "pyarrow", "scipy", "pandas", "matplotlib"]


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["--help"], "train"),
        (["plan", "--help"], "--topology"),
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
        f"print([name for name in {HEAVY} if name in sys.modules])"
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
