"""Every script in examples/ runs as it stands; those that mention torchrun run on two ranks too."""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
CASES = [
    pytest.param(path, launcher, id=f"{path.stem}-{name}")
    for path in EXAMPLES
    for name, launcher in [("alone", [sys.executable]), ("two_ranks", TORCHRUN)]
    if name == "alone" or "torchrun" in path.read_text().partition('"""')[2].partition('"""')[0]
]


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(("path", "launcher"), CASES)
def test_example(path: Path, launcher: list[str], tmp_path: Path) -> None:
    run = subprocess.run([*launcher, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout, "an example prints what it shows"
