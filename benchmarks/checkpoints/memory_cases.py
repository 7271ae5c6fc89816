"""Runs of one table, and the operations on their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common.item_run import ROW_BYTES, make_config, make_data
from common.processes import MESETA

from checkpoints.memory_peaks import peaks_of
from meseta.spec.tiers import ROW_INDEX_BYTES

NUM_SAMPLES, STEPS = 150_000, 10
CACHE_BYTES = 200_000_000
ALLOWED_BYTES = 512 << 20
POLICIES = ("none", "one_shot", "consecutive", "intermittent", "rolling")
TIERS = ("hbm", "cached", "disk")
OF_CHECKPOINTS = ("verify", "compact", "export")
"""Commands that hold no table, in all tiers."""
PROCESS = ("-m", "checkpoints.memory_process")


@dataclass(frozen=True)
class Run:
    """Training run whose operations are measured, each in a separate process."""

    gigabytes: float
    policy: str
    tier: str

    @property
    def num_rows(self) -> int:
        return int(self.gigabytes * 1e9 / ROW_BYTES)

    @property
    def operations(self) -> tuple[str, ...]:
        commands = OF_CHECKPOINTS if self.tier == "disk" else ()
        imports = ("import",) if self.policy == "none" else ()
        return ("save", "resume", "predict", *commands, *imports)

    def name(self, operation: str) -> str:
        where = f"{self.policy}/{'-' if operation in OF_CHECKPOINTS else self.tier}"
        return f"{self.gigabytes:g} GB/{where}/{operation}"

    @property
    def table_bytes(self) -> int:
        """Memory of the table during training."""
        stored = ROW_INDEX_BYTES * self.num_rows if self.tier == "disk" else int(self.gigabytes * 1e9)
        return stored + (CACHE_BYTES if self.tier != "hbm" else 0)


def runs_of(sizes: Sequence[float]) -> list[Run]:
    return [Run(gigabytes, policy, tier) for gigabytes, tier, policy in product(sizes, TIERS, POLICIES)]


class Measurement:
    """Operations of one run in a temporary folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder / "run"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._data = make_data(folder, run.num_rows, NUM_SAMPLES)

    def measure(self, operation: str) -> Mapping[str, Any]:
        """Return the peaks of the operation and of its baseline in bytes."""
        peaks = self._peaks(self.run.name(operation), self._arguments(operation))
        if operation in ("save", "resume"):
            level = max(peaks["training"], peaks["start"])
            if operation == "save" and self.run.tier == "cached":
                level = max(level, self._training_alone())
            most = max(peaks.get("save", 0), peaks["load"] if operation == "resume" else 0)
        elif operation == "import":
            # Rows in host memory take pages only as they are written.
            unwritten = self.run.table_bytes if self.run.tier == "cached" else 0
            level, most = peaks["start"] + unwritten, peaks["import"]
        else:
            level, most = (self.run.table_bytes if operation == "predict" else 0), max(peaks.values())
        return {"level": level, "peak": most, "more": max(most - level, 0), "peaks": peaks}

    def _peaks(self, name: str, arguments: Sequence[object]) -> dict[str, int]:
        code, peaks, printed = peaks_of(arguments, self.folder)
        if code != 0:
            raise RuntimeError(f"{name} ended with {code}: {printed}")
        return peaks

    def _training_alone(self) -> int:
        """Return the peak of training without saves. Rows in memory use pages only after training has changed them."""
        arguments = [*PROCESS, "train_only", self._config("alone", 3 * STEPS), self.folder / "phase"]
        peaks = self._peaks(f"training of {self.run.name('save')}", arguments)
        shutil.rmtree(self.folder / "alone")
        return max(peaks.values())

    def _arguments(self, operation: str) -> list[object]:
        run, meseta = self.folder / "run", MESETA[1:]
        if operation in ("save", "resume"):
            steps = (3 if operation == "save" else 5) * STEPS
            return [*PROCESS, "train", self._config("run", steps), self.folder / "phase"]
        if operation == "predict":
            return [*meseta, "predict", run, "--out", self.folder / "predictions.parquet"]
        if operation == "import":
            shutil.rmtree(run)
            model, config = self.folder / "model.pt", self._config("imported", STEPS)
            self._peaks("model", [*PROCESS, "model", self._config("model", STEPS, "hbm"), model])
            return [*PROCESS, "import", config, self.folder / "phase", model]
        out = [] if operation == "verify" else ["--out", self.folder / operation]
        return [*meseta, "checkpoint", operation, run, *out]

    def _config(self, name: str, num_steps: int, tier: str | None = None) -> Path:
        tier = tier or self.run.tier
        path = self.folder / f"{name}.json"
        document = make_config(self.folder / name, self._data, tier, CACHE_BYTES, num_steps)
        document["data"]["shuffle_window_rows"] = 10_000
        document["checkpoint"] |= {
            "every_steps": STEPS,
            "deltas": self.run.policy,
            "background": "auto" if tier == "disk" else "never",
        }
        path.write_text(json.dumps(document))
        return path

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
