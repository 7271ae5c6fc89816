"""Peak memory of operations on checkpoints, each in a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_checkpoint.py"


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["hbm", "cached", "disk"])
def test_no_operation_takes_more_than_its_bound(tier: str, tmp_path: Path) -> None:
    # All policies run, with a table of 0.6 GB, which is larger than the bound.
    sizes = ["memory", "--sizes", "0.6", "--only", f"/{tier}/", "--no-record", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
