"""A stream of rows need not fit into memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import meseta
from meseta.data.prepare.staging import SPOOL_FOLDER

MAX_GROWTH_BYTES = 600 * 10**6
JOB = """
import sys, numpy as np, pyarrow as pa, meseta

def batches(num_rows):
    draw = np.random.default_rng(0)
    for _ in range(num_rows // 10_000):
        users, price = draw.integers(0, 5000, 10_000), draw.random(10_000)
        clicked = draw.random(10_000) < 0.1 + 0.5 * price + 0.3 * (users % 2)
        columns = [clicked, [f"user{n}" for n in users], draw.integers(0, 900, 10_000), price, draw.random(10_000)]
        yield pa.record_batch([pa.array(column) for column in columns], SCHEMA)

SCHEMA = pa.schema([("clicked", pa.bool_()), ("user", pa.string()), ("item", pa.int64()), ("price", pa.float64()),
                    ("age", pa.float64())])
config = {"model": {"name": "deepfm", "embedding_dim": 8, "deep_mlp": [16]}, "embedding": {"optimizer": {"lr": 0.05}},
          "train": {"batch_size": 8192, "epochs": 2}}
meseta.fit(pa.RecordBatchReader.from_batches(SCHEMA, batches(int(sys.argv[1]))), "clicked", config=config,
           sparse=["item"], run_dir=sys.argv[2], nproc=2)
"""


def peak_bytes_of_tree(pid: int) -> dict[int, int]:
    """Return the peak resident bytes of a process and of each of its descendants that runs now."""
    parents, peaks = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text(errors="replace").splitlines())
        except OSError:  # The process has ended.
            continue
        parents[int(path.parent.name)] = int(fields["PPid"])
        if "VmHWM" in fields:  # Not of a zombie.
            peaks[int(path.parent.name)] = int(fields["VmHWM"].split()[0]) * 1024
    tree, size = {pid}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {child for child, parent in parents.items() if parent in tree}
    return {process: peaks[process] for process in tree if process in peaks}


def fit_in_process(num_rows: int, run_dir: Path) -> int:
    """Fit a stream in another process. Return the sum of the peaks of all its processes in bytes."""
    job = subprocess.Popen([sys.executable, "-c", JOB, str(num_rows), str(run_dir)])
    peaks = dict[int, int]()
    while job.poll() is None:
        peaks |= peak_bytes_of_tree(job.pid)  # A peak never decreases.
        time.sleep(0.05)
    assert job.returncode == 0
    print(num_rows, {pid: peak >> 20 for pid, peak in peaks.items()})
    return sum(peaks.values())


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_five_million_rows_of_a_stream_need_little_more_memory_than_fifty_thousand(tmp_path: Path) -> None:
    few, many = (fit_in_process(num_rows, tmp_path / str(num_rows)) for num_rows in (50_000, 5_000_000))
    assert many - few <= MAX_GROWTH_BYTES
    run = meseta.open_run(tmp_path / "5000000")
    assert run.metrics["test"]["num_samples"] == pytest.approx(500_000, rel=0.01)
    assert not (run.path / SPOOL_FOLDER).exists()
