"""Rows of a synthetic world for one seed: drawn, prepared, and stored with the true probabilities of the test split."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.spec import MesetaError
from tools.quality.jobs import Step
from tools.quality.suite import NUM_WORLD_FILES, SuiteWorld

ROWS_FOLDER, TRUTH_FILE, BEST_FILE = "rows", "truth.npz", "best.json"
"""Files in the folder of a world: the dataset, the true probabilities of its test rows, and their metrics."""
MIN_COUNT = 10
"""Minimum number of occurrences in training for an id to have its own row. Rarer ids matter little in a world."""


def world_steps(world: SuiteWorld, seed: int, out: Path) -> list[Step]:
    """Return the steps of a job that creates the folder of a world for `seed`. The folder appears when complete.

    Deletes what an interrupted job has left.
    """
    work = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(work, ignore_errors=True)
    raw = work / "raw"
    kind = ["--world", world.world, "--strength", repr(world.strength), "--scale", repr(world.scale)]
    size = ["--rows", str(world.rows), "--files", str(NUM_WORLD_FILES), "--seed", str(seed)]
    valid, test = (str(raw / f"day_{NUM_WORLD_FILES - number}.tsv") for number in (2, 1))
    splits = ["--valid-files", valid, "--test-files", test, "--vocabulary", "--min-count", str(MIN_COUNT)]
    return [
        ["data", "synth", "--out", str(raw), *kind, *size, "--probabilities"],
        ["prepare", str(raw / "*.tsv"), "--out", str(work / ROWS_FOLDER), *splits],
        partial(_finish_world, work, out),
    ]


def _finish_world(work: Path, out: Path) -> None:
    raw, test = work / "raw", f"day_{NUM_WORLD_FILES - 1}"
    truth = pq.read_table(raw / f"{test}.probability.parquet")
    np.savez(work / TRUTH_FILE, labels=truth["label"].to_numpy(), probabilities=truth["probability"].to_numpy())
    teacher = json.loads((raw / "teacher.json").read_text())
    (work / BEST_FILE).write_text(json.dumps(best_reachable_metrics(teacher["files"][f"{test}.tsv"])))
    shutil.rmtree(raw)
    work.rename(out)


def best_reachable_metrics(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of the true probabilities on the test rows, by name."""
    reached = {name: value for name in ("auc", "ne") if (value := metrics[name]) is not None}
    return {"regret": 0.0, **reached}


def read_true_probabilities(folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (labels, true probabilities) of the test rows of a world. Raises MesetaError if its folder has none."""
    arrays = read_arrays(folder / TRUTH_FILE, f"delete {str(folder)!r}, and start the suite again")
    return arrays["labels"], arrays["probabilities"]


def read_arrays(path: Path, way_out: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of a file written by `numpy.savez`. Raises MesetaError with the remedy `way_out` if reading
    fails."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MesetaError(f"quality: {str(path)!r} cannot be read ({error}); {way_out}") from None
