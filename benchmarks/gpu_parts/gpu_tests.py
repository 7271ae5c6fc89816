"""The tests of tests/gpu."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

from common.processes import run_and_print
from record import ROOT

from gpu_parts.rows import RowWriter

NUM_PROCESSES = 6
"""Number of processes of pytest-xdist, which share the GPU."""


def check(rows: RowWriter) -> None:
    parallel = ["-n", str(NUM_PROCESSES), "--dist", "worksteal"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-rf", *parallel, "tests/gpu"]
    code, lines = run_and_print(command, cwd=ROOT)
    add_outcome(rows, lines, code)


def add_outcome(rows: RowWriter, lines: list[str], exit_code: int) -> None:
    """Add a row for each failed test, and one for all. A run in which every test is skipped does not pass."""
    for line in lines:
        if line.startswith("FAILED "):
            test, _, reason = line.removeprefix("FAILED ").partition(" - ")
            rows.holds(test, False, reason)
    summary = lines[-1].strip("= ") if lines else "no output"
    rows.holds("tests/gpu", exit_code == 0 and re.search(r"\b\d+ passed", summary) is not None, summary)
