"""Rows of a synthetic world for one seed: drawn, prepared, and stored with the true probabilities of the test split."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.synth import ClickLog, SynthOptions, write_click_log
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import atomic_folder
from meseta.train.quality.suite import NUM_WORLD_FILES, SuiteWorld

ROWS_FOLDER, TRUTH_FILE, BEST_FILE = "rows", "truth.npz", "best.json"
"""Files in the folder of a world: the dataset, the true probabilities of its test rows, and their metrics."""
MIN_COUNT = 10
"""Minimum number of occurrences in training for an id to have its own row. Rarer ids matter little in a world."""


@dataclass(frozen=True)
class TrueProbabilities:
    """Labels and true probabilities of the test rows, in their order."""

    labels: NDArray[Any]
    probabilities: NDArray[Any]


def make_world(world: SuiteWorld, seed: int, out: Path) -> None:
    """Create the folder of a world for `seed` atomically. Raises MesetaError if files cannot be written."""
    with atomic_folder(out) as folder:
        raw = folder / "raw"
        log = ClickLog(seed, world.scale, world.world, world.strength)
        options = SynthOptions(out=raw, num_rows=world.rows, num_files=NUM_WORLD_FILES, log=log, probabilities=True)
        teacher = write_click_log(options)
        valid, test = options.file_names[-2:]
        prepare(
            PrepareOptions(
                sources=[str(raw / "*.tsv")],
                out=folder / ROWS_FOLDER,
                valid_files=[str(raw / valid)],
                test_files=[str(raw / test)],
                vocabulary=True,
                min_count=MIN_COUNT,
            )
        )
        truth = pq.read_table(raw / f"{Path(test).stem}.probability.parquet")
        np.savez(folder / TRUTH_FILE, labels=truth["label"].to_numpy(), probabilities=truth["probability"].to_numpy())
        (folder / BEST_FILE).write_text(json.dumps(best_reachable_metrics(teacher["files"][test])))
        shutil.rmtree(raw)


def best_reachable_metrics(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of the true probabilities on the test rows, by name."""
    reached = {name: value for name in ("auc", "ne") if (value := metrics[name]) is not None}
    return {"regret": 0.0, **reached}


def read_true_probabilities(folder: Path) -> TrueProbabilities:
    """Read the true probabilities of a world. Raises MesetaError if its folder has none."""
    arrays = read_arrays(folder / TRUTH_FILE, f"delete {str(folder)!r}, and start the suite again")
    return TrueProbabilities(arrays["labels"], arrays["probabilities"])


def read_arrays(path: Path, way_out: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of a file written by `numpy.savez`. Raises MesetaError with the remedy `way_out` if reading
    fails."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MesetaError(f"quality: {str(path)!r} cannot be read ({error_summary(error)}); {way_out}") from None
