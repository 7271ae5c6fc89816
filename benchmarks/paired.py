"""What trainings have in common whose quality is compared over paired seeds: the log, the least move of a weight, and
the interval of their mean difference."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from scipy import stats

if TYPE_CHECKING:
    from torch import Tensor

FILE_ROWS, TRAIN_FILES, TEST_FILES = 200_000, 8, 10
"""Those of the main job, and two million rows for testing where it has one file."""
QUICK_ROWS, QUICK_FILES = 2000, 2
"""Of a file, and files for training and for testing each."""
STEADY_SCALE, STEADY = 0.001, ("embedding.init.scale=0.2",)
"""Of the log, and of the main job, such that every pair of features is learned in time: on the main job's own ids runs
of one seed lie 0.2 % of NE apart (one standard deviation) for one rounding."""


def num_test_rows(quick: bool) -> int:
    """Of `prepared_log`."""
    return QUICK_ROWS * QUICK_FILES if quick else FILE_ROWS * TEST_FILES


def difference(some: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half of its 95 % interval."""
    differences = [a - b for a, b in zip(some, base, strict=True)]
    if len(differences) < 2:
        return fmean(differences), inf
    quantile = float(stats.t.ppf(0.975, len(differences) - 1))
    return fmean(differences), quantile * stdev(differences) / len(differences) ** 0.5


def move_by_an_ulp(weight: Tensor) -> None:
    """To the next number above, in place."""
    import torch

    with torch.no_grad():
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))


def prepared_log(folder: Path, scale: float, quick: bool) -> Path:
    """The log of the main job with more files for testing, prepared; made once."""
    raw, out = folder / "raw", folder / "data"
    if (folder / "done").exists():
        return out
    rows, num_train, num_test = (
        (QUICK_ROWS, QUICK_FILES, QUICK_FILES) if quick else (FILE_ROWS, TRAIN_FILES, TEST_FILES)
    )
    files = num_train + num_test
    for place in (raw, out):
        shutil.rmtree(place, ignore_errors=True)
    _meseta("data", "synth", "--out", raw, "--rows", rows * files, "--files", files, "--scale", scale)
    tests = [word for number in range(num_train, files) for word in ("--test-files", raw / f"day_{number}.tsv")]
    _meseta("prepare", raw / "*.tsv", "--out", out, *tests)
    shutil.rmtree(raw)
    (folder / "done").touch()
    return out


def _meseta(*arguments: object) -> None:
    command = [sys.executable, "-m", "meseta.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
