"""Trainings that are compared over paired seeds."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scipy import stats

from common.processes import run_meseta

if TYPE_CHECKING:
    from torch import Tensor

FILE_ROWS, TRAIN_FILES, TEST_FILES = 200_000, 8, 10
"""Rows and files of the main job, with two million rows for testing."""
QUICK_ROWS, QUICK_FILES = 2000, 2
STEADY_SCALE, STEADY = 0.001, ("embedding.init.scale=0.2",)
"""Scale of the log, and overrides with which every pair of features is learned early. Otherwise a single rounding
changes NE by 0.2 %."""


def num_test_rows(quick: bool) -> int:
    return QUICK_ROWS * QUICK_FILES if quick else FILE_ROWS * TEST_FILES


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, lower end, upper end) of the 95 % interval by Student's t, which is infinite for one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, mean - reach, mean + reach


def difference(some: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and half of its 95 % interval."""
    mean, _, high = interval([a - b for a, b in zip(some, base, strict=True)])
    return mean, high - mean


def move_by_an_ulp(weight: Tensor) -> None:
    """Replace a weight by the next larger number."""
    import torch

    with torch.no_grad():
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))


def prepared_log(folder: Path, scale: float, quick: bool) -> Path:
    """Prepare the log of the main job with more test files, unless it exists."""
    raw, out = folder / "raw", folder / "data"
    if (folder / "done").exists():
        return out
    rows, num_train, num_test = (
        (QUICK_ROWS, QUICK_FILES, QUICK_FILES) if quick else (FILE_ROWS, TRAIN_FILES, TEST_FILES)
    )
    files = num_train + num_test
    for place in (raw, out):
        shutil.rmtree(place, ignore_errors=True)
    run_meseta("data", "synth", "--out", raw, "--rows", rows * files, "--files", files, "--scale", scale)
    tests = [word for number in range(num_train, files) for word in ("--test-files", raw / f"day_{number}.tsv")]
    run_meseta("prepare", raw / "*.tsv", "--out", out, *tests)
    shutil.rmtree(raw)
    (folder / "done").touch()
    return out
