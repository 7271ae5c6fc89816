"""Compare `meseta predict --data` with `prepare` and `predict`.

    python benchmarks/bench_predict_data.py [--rows N] [--small N]

Both must write the same bytes. The peak memory is compared with that for the first `--small` rows. The limit of the
difference is 300 MB.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common.command import make_parser, parse_arguments
from common.processes import MESETA, check_tests, run_meseta
from record import record

LIMIT_MB = 300.0
# Peak memory is that of the command and of its children, which this process does not share.
MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
elapsed_s = time.perf_counter() - start
print(json.dumps([elapsed_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""
CONFIG = """
run_dir: {folder}/run
data: {{dir: {folder}/data}}
model: {{name: dlrm, embedding_dim: 16, bottom_mlp: [64, 16], top_mlp: [64]}}
train: {{max_steps: 20}}
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--small", type=int, default=10_000)
    options = parse_arguments(parser)
    check_tests("tests/train/test_new_predictions.py")
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as name:
        folder = Path(name)
        trained(folder)
        files = {rows: without_labels(folder, rows) for rows in (options.small, options.rows)}
        spent = {rows: measured(folder, "predict", "--data", file, "--out", file.with_suffix(".csv"))
                 for rows, file in files.items()}  # fmt: skip
        file = files[options.rows]
        prepared = measured(folder, "prepare", file, "--out", folder / "new")
        predicted = measured(folder, "predict", "--data", folder / "new", "--out", folder / "two.csv")
        if (folder / "two.csv").read_bytes() != file.with_suffix(".csv").read_bytes():
            sys.exit("bench_predict_data: the two ways differ, nothing is reported")
    case = f"{options.rows} rows of 39 columns"
    seconds, peak_mb = spent[options.rows]
    beside = prepared[0] + predicted[0]
    record("predict", case, "predict --data", options.rows / seconds, "rows/s",
           peer="prepare + predict", peer_value=options.rows / beside)  # fmt: skip
    more_mb = peak_mb - spent[options.small][1]
    record("predict", case, f"memory above {options.small} rows", max(more_mb, 1.0), "MB",
           peer="the limit", peer_value=LIMIT_MB)  # fmt: skip


def trained(folder: Path) -> None:
    run_meseta("data", "synth", "--out", folder / "raw", "--rows", 400_000, "--files", 2, "--scale", 0.01)
    run_meseta("prepare", folder / "raw/day_0.tsv", "--out", folder / "data", "--hash-rows", 10_000)
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder))
    run_meseta("train", folder / "run.yaml")


def without_labels(folder: Path, num_rows: int) -> Path:
    """Write rows of the second file repeatedly, without labels."""
    path = folder / f"{num_rows}.tsv"
    with (folder / "raw/day_1.tsv").open("rb") as file:
        lines = [line.partition(b"\t")[2] for line in file]
    with path.open("wb") as out:
        out.writelines(itertools.islice(itertools.cycle(lines), num_rows))
    return path


def measured(folder: Path, command: str, *arguments: object) -> tuple[float, float]:
    """Return (seconds, peak MB) of a command."""
    run = ["--like", folder / "run"] if command == "prepare" else [folder / "run"]
    words = [*MESETA, command, *map(str, [*run, *arguments])]
    child = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True)
    seconds, peak_mb = json.loads(child.stdout)
    return seconds, peak_mb


if __name__ == "__main__":
    main()
