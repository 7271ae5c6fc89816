"""The main job on a GPU: speed in the third epoch, test AUC relative to the CPU's, and waits for data.

PYTHONPATH=benchmarks python -m gpu_parts.main_job    trains on the CPU for each AUC that is not stored
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from common.processes import run_meseta
from common.result_store import ResultStore
from record import ROOT

from gpu_parts.rows import RowWriter

DATA, CONFIG = ROOT / "data" / "main", ROOT / "examples" / "configs" / "main.yaml"
NUM_EPOCHS, NUM_ROWS, DECAY_START_SAMPLES = 3, 1_600_000, 390 * 2048
MAX_AUC_DIFFERENCE = 0.002
CPU_RESULTS = ResultStore.FOLDER / "gpu_main_job.json"


class Case(NamedTuple):
    batch_size: int
    dtype: str
    min_samples_per_s: float

    @property
    def name(self) -> str:
        return f"main job, {self.batch_size:,}, {self.dtype}"


CASES = (Case(2048, "float32", 1.5e6), Case(16384, "bfloat16", 4e6))


def prepare(rows: RowWriter) -> None:
    """Prepare the data as `make train` does, unless they exist."""
    if (DATA / "done").exists():
        rows.measured("data of the main job", "already prepared")
        return
    with TemporaryDirectory(dir=ROOT) as folder:
        raw = Path(folder, "raw")
        run_meseta("data", "synth", "--out", raw, "--rows", 1_800_000, "--files", 9, "--scale", 0.01)
        run_meseta("prepare", raw / "*.tsv", "--out", DATA, "--test-files", raw / "day_8.tsv")
    (DATA / "done").touch()
    rows.measured("data of the main job", "prepared")


def train(case: Case, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train three epochs. Return the content of summary.json, and the training lines of metrics.jsonl."""
    start = DECAY_START_SAMPLES // case.batch_size
    with TemporaryDirectory() as run_dir:
        run_meseta(
            "train", CONFIG, f"run_dir={run_dir}/run", f"data.dir={DATA}", f"device={device}",
            f"train.epochs={NUM_EPOCHS}", f"train.batch_size={case.batch_size}", f"dense.dtype={case.dtype}",
            f"embedding.schedule.decay_start_step={start}", f"dense.schedule.decay_start_step={start}",
            "dense.check_speed=false",
        )  # fmt: skip
        summary = json.loads(Path(run_dir, "run", "summary.json").read_text())
        lines = [json.loads(line) for line in Path(run_dir, "run", "metrics.jsonl").read_text().splitlines()]
    return summary, [line for line in lines if line["kind"] == "train"]


def last_epoch(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """Return samples per second and the share of time waiting for data in the last epoch.

    It begins after the first line of that epoch. The share is `None` if waits are not recorded.
    """
    first, *rest = [line for line in lines if line["num_samples"] >= (NUM_EPOCHS - 1) * NUM_ROWS]
    seconds = rest[-1]["time_s"] - first["time_s"]
    num_samples = rest[-1]["num_samples"] - first["num_samples"]
    steps = [line["step"] for line in (first, *rest)]
    waits = [line["stages_s"].get("data") for line in rest]
    if None in waits:
        return num_samples / seconds, None
    waited_s = sum(wait * (end - begin) for wait, begin, end in zip(waits, steps, steps[1:], strict=False))
    return num_samples / seconds, waited_s / seconds


def cpu_auc(case: Case) -> float:
    """Return the stored AUC of the CPU, which is computed if it is missing."""
    result = ResultStore(CPU_RESULTS).get(f"{case.batch_size} {case.dtype}", partial(_train_on_cpu, case))
    return float(result["test_auc"])


def _train_on_cpu(case: Case) -> dict[str, float]:
    return {"test_auc": train(case, "cpu")[0]["test"]["auc"]}


def check(rows: RowWriter) -> None:
    if not (DATA / "done").exists():
        rows.holds("data of the main job", False, "missing; run the check 'data' first")
        return
    for case in CASES:
        add_outcome(rows, case, *train(case, "cuda"))


def add_outcome(rows: RowWriter, case: Case, summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    rate, wait_share = last_epoch(lines)
    rows.at_least(f"{case.name}: third epoch", rate, case.min_samples_per_s, "samples/s")
    rows.measured(f"{case.name}: waiting for data", "not recorded" if wait_share is None else 100 * wait_share, "%")
    graphs = summary.get("graphs", {})
    num_replayed, eager = graphs.get("num_replayed_steps", 0), graphs.get("eager_steps", {})
    reasons = "".join(f", {count:,} eager: {reason}" for reason, count in eager.items())
    rows.measured(f"{case.name}: replayed steps", f"{num_replayed:,} of {summary['num_steps']:,}{reasons}")
    auc, expected = summary["test"]["auc"], cpu_auc(case)
    difference = math.fabs(auc - expected)
    rows.at_most(f"{case.name}: test AUC {auc:.5f}, CPU {expected:.5f}", difference, MAX_AUC_DIFFERENCE, "difference")


if __name__ == "__main__":
    for case in CASES:
        print(case.name, cpu_auc(case))
