"""`meseta plan` and `meseta --help` start quickly: nothing from the planner down loads torch, even indirectly.

`meseta doctor` does not either: it has to tell when torch is broken.
"""

import subprocess
import sys

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


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['meseta', '--help']\n"
        "from meseta.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "train" in run.stdout
