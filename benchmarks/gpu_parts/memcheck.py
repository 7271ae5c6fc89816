"""Memory checks of a step with compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_path.training import Training, TrainingCase

from gpu_parts.rows import RowWriter

NUM_STEPS = 4
CASE = TrainingCase(model="dlrm", is_ragged=True)
RUNS = {
    # Each tensor is a separate allocation, so that its bounds are known. Graphs cannot be captured then.
    "eager": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "replayed": {},
}
ERROR_CODE = 9


def find_tool() -> str | None:
    """Return the path of compute-sanitizer, or `None` if it is not installed."""
    folders = [os.environ["CUDA_HOME"]] if "CUDA_HOME" in os.environ else []
    paths = [str(Path(folder, "bin")) for folder in (*folders, "/usr/local/cuda")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(paths))


def check(rows: RowWriter) -> None:
    tool = find_tool()
    if tool is None:
        rows.skip("memcheck", "compute-sanitizer is not installed")
        return
    for kind, variables in RUNS.items():
        done = subprocess.run(
            [
                # torch handles some errors of CUDA's functions itself.
                tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(ERROR_CODE),
                "--target-processes", "application-only", sys.executable, "-m", "gpu_parts.memcheck", kind,
            ],
            check=False, capture_output=True, text=True, env={**os.environ, **variables},
        )  # fmt: skip
        print(done.stdout, done.stderr, flush=True)
        add_outcome(rows, kind, done)


def add_outcome(rows: RowWriter, kind: str, done: subprocess.CompletedProcess[str]) -> None:
    """Add a row about the last line of the tool, or of the step if that failed."""
    lines = [line.strip("= ") for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
    summary = next((line for line in reversed(lines) if "ERROR SUMMARY" in line), lines[-1] if lines else "no output")
    rows.holds(f"memcheck of {NUM_STEPS} {kind} steps", done.returncode == 0 and "ERROR SUMMARY: 0" in summary, summary)


if __name__ == "__main__":
    training = Training(CASE, "cuda", uses_graphs=sys.argv[1] == "replayed")
    for _ in range(NUM_STEPS):
        training.step()
    training.pipeline.synchronize()
