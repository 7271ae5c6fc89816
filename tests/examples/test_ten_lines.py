"""The ten-line loop prints the same losses on one process and on two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT

EXAMPLE = ROOT / "examples" / "01_ten_lines.py"


def losses(launcher: list[str], folder: Path) -> list[float]:
    run = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [float(line.split()[-1]) for line in run.stdout.splitlines()]


def test_two_ranks_print_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = losses([], tmp_path)
    together = losses(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], tmp_path)
    assert len(alone) == 5 and alone[-1] < 0.1 * alone[0]
    assert together == pytest.approx(alone, rel=0.0, abs=1e-5)
