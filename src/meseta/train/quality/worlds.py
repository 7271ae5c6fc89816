"""The rows of a world of one seed: drawn, prepared, and with the true probabilities of the test split beside them."""

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
from meseta.machine.files import atomic_folder
from meseta.spec import MesetaError
from meseta.train.quality.suite import NUM_WORLD_FILES, SuiteWorld

ROWS_FOLDER, TRUTH_FILE, BEST_FILE = "rows", "truth.npz", "best.json"
"""In the folder of a world: the dataset, the truth of its test rows, and the figures that this truth has itself."""
MIN_COUNT = 10
"""Times that an id comes in training to have a row of its own; the law lets rare ids matter little."""


@dataclass(frozen=True)
class TrueProbabilities:
    """Of the rows of a test split, in their order."""

    labels: NDArray[Any]
    probabilities: NDArray[Any]


def make_world(world: SuiteWorld, seed: int, out: Path) -> None:
    """Make the folder of a world of a seed, whole or not at all. Raises MesetaError where the system refuses."""
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


def best_reachable_metrics(figures: Mapping[str, float | None]) -> dict[str, float]:
    """What the true probabilities reach on the test rows, by figure."""
    reached = {name: value for name in ("auc", "ne") if (value := figures[name]) is not None}
    return {"regret": 0.0, **reached}


def read_true_probabilities(folder: Path) -> TrueProbabilities:
    """Raises MesetaError where the folder of a world has none."""
    found = read_arrays(folder / TRUTH_FILE, f"delete {str(folder)!r}, and it is made again")
    return TrueProbabilities(found["labels"], found["probabilities"])


def read_arrays(path: Path, way_out: str) -> dict[str, NDArray[Any]]:
    """Those of a file that `numpy.savez` wrote. Raises MesetaError, with the way out, where it cannot be read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MesetaError(f"quality: {str(path)!r} cannot be read ({error_summary(error)}); {way_out}") from None
