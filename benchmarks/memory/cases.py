"""Runs of one table, and the operations on their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tiers.stores_part import memory_group

from memory.measured import peaks_of
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec.tiers import ROW_INDEX_BYTES

WIDTH, ROW_BYTES, BATCH_SIZE, NUM_SAMPLES, STEPS = 64, 260, 2048, 150_000, 10
NEAR_BYTES = 200_000_000
ALLOWED_BYTES = 512 << 20
GROUP_BYTES = 3 << 30
"""Limit of the control group of the largest table, if its rows are on a disk."""
POLICIES = ("none", "one_shot", "consecutive", "intermittent", "rolling")
TIERS = ("hbm", "cached", "disk")
OF_CHECKPOINTS = ("verify", "compact", "export")
"""Commands that hold no table, in all tiers."""


@dataclass(frozen=True)
class Run:
    """Training run whose operations are measured, each in a separate process."""

    gigabytes: float
    policy: str
    tier: str
    in_group: bool

    @property
    def num_rows(self) -> int:
        return int(self.gigabytes * 1e9 / ROW_BYTES)

    @property
    def operations(self) -> tuple[str, ...]:
        if self.in_group or self.gigabytes > 4:
            return ("save", "resume")
        commands = OF_CHECKPOINTS if self.tier == "disk" else ()
        imports = ("import",) if self.policy == "none" else ()
        return ("save", "resume", "predict", *commands, *imports)

    def name(self, operation: str) -> str:
        where = f"{self.policy}/{'-' if operation in OF_CHECKPOINTS else self.tier}"
        return f"{self.gigabytes:g} GB/{where}/{operation}{' in 3 GB' if self.in_group else ''}"

    @property
    def table_bytes(self) -> int:
        """Memory of the table during training."""
        stored = ROW_INDEX_BYTES * self.num_rows if self.tier == "disk" else int(self.gigabytes * 1e9)
        return stored + (NEAR_BYTES if self.tier != "hbm" else 0)


def runs_of(sizes: list[float], large: list[float]) -> Iterator[Run]:
    for gigabytes, tier, policy in product(sizes, TIERS, POLICIES):
        yield Run(gigabytes, policy, tier, in_group=False)
    for gigabytes, tier, policy in product(large, TIERS, POLICIES):
        yield Run(gigabytes, policy, tier, in_group=tier == "disk")


class Measurement:
    """Operations of one run in a temporary folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder / "run"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._data = make_data(folder, run.num_rows)
        self._is_refused = False

    def measure(self, operation: str) -> Mapping[str, Any]:
        """Return the peaks of the operation and of its baseline in bytes, or why it was refused."""
        if self._is_refused:
            return {"refused": True}
        with ExitStack() as held:
            group = held.enter_context(memory_group(GROUP_BYTES)) if self.run.in_group else None
            code, peaks, printed = peaks_of(self._arguments(operation), self.folder, group)
        if code != 0 and "this run needs" in printed:
            self._is_refused = True
            return {"refused": True}
        if code != 0:
            raise RuntimeError(f"{self.run.name(operation)} ended with {code}: {printed}")
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

    def _training_alone(self) -> int:
        """Return the peak of training without saves. Rows in memory use pages only after training has changed them."""
        config = self._config("alone", 3 * STEPS)
        arguments = ["-m", "memory.run_process", "train_only", config, self.folder / "phase"]
        code, peaks, printed = peaks_of(arguments, self.folder)
        if code != 0:
            raise RuntimeError(f"training of {self.run.name('save')} ended with {code}: {printed}")
        shutil.rmtree(self.folder / "alone")
        return max(peaks.values())

    def _arguments(self, operation: str) -> list[object]:
        run, meseta = self.folder / "run", ["-m", "meseta.cli.main"]
        if operation in ("save", "resume"):
            steps = (3 if operation == "save" else 5) * STEPS
            return ["-m", "memory.run_process", "train", self._config("run", steps), self.folder / "phase"]
        if operation == "predict":
            return [*meseta, "predict", run, "--out", self.folder / "predictions.parquet"]
        if operation == "import":
            shutil.rmtree(run)
            model, config = self.folder / "model.pt", self._config("imported", STEPS)
            plain = self._config("model", STEPS, "hbm")
            peaks_of(["-m", "memory.run_process", "model", plain, model], self.folder)
            return ["-m", "memory.run_process", "import", config, self.folder / "phase", model]
        out = [] if operation == "verify" else ["--out", self.folder / operation]
        return [*meseta, "checkpoint", operation, run, *out]

    def _config(self, name: str, num_steps: int, tier: str | None = None) -> Path:
        tier = tier or self.run.tier
        path = self.folder / f"{name}.json"
        document: dict[str, Any] = {
            "run_dir": str(self.folder / name),
            "data": {"dir": str(self._data), "shuffle_window_rows": 10_000},
            "model": {"embedding_dim": WIDTH, "bottom_mlp": [WIDTH], "top_mlp": [64]},
            "embedding": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
            "train": {"batch_size": BATCH_SIZE, "eval_batch_size": BATCH_SIZE, "max_steps": num_steps},
            "checkpoint": {
                "keep_last": 1,
                "every_steps": STEPS,
                "deltas": self.run.policy,
                "background": "auto" if tier == "disk" else "never",
            },
            "plan": {"tables": {"item": {"sharding": "table_wise", "tier": tier}, "*": "table_wise"}},
        }
        if tier != "hbm":
            document["storage"] = {"dir": str(self.folder / "rows"), "cache_bytes": NEAR_BYTES}
        path.write_text(json.dumps(document))
        return path

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def make_data(folder: Path, num_rows: int) -> Path:
    """Create samples with random ids of a table, unless they exist."""
    out = folder / f"data-{num_rows}"
    if not out.exists():
        random = np.random.default_rng(0)
        columns = {
            "label": random.random(NUM_SAMPLES) < 0.3,
            "price": random.standard_normal(NUM_SAMPLES),
            "item": pa.array(random.integers(0, num_rows, NUM_SAMPLES)),
            "city": pa.array(random.integers(0, 1000, NUM_SAMPLES)),
        }
        pq.write_table(pa.table(columns), folder / "samples.parquet")
        rows = {"item": num_rows, "city": 1000}
        options = {"test_fraction": 0.1, "hash_rows_by_feature": rows, "sparse": list(rows)}
        prepare(PrepareOptions(sources=[str(folder / "samples.parquet")], out=out, **options))
    return out
