"""Memory checks of a step with compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from common.processes import run_and_print
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
        command = [
            # torch handles some errors of CUDA's functions itself.
            tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(ERROR_CODE),
            "--target-processes", "application-only", sys.executable, "-m", "gpu_parts.memcheck", kind,
        ]  # fmt: skip
        code, lines = run_and_print(command, env={**os.environ, **variables})
        add_outcome(rows, kind, lines, code)


def add_outcome(rows: RowWriter, kind: str, lines: list[str], exit_code: int) -> None:
    """Add a row with the summary of the tool, or the last line of the step if that failed."""
    summaries = [line for line in lines if "ERROR SUMMARY" in line] or lines[-1:] or ["no output"]
    is_clean = exit_code == 0 and "ERROR SUMMARY: 0 " in summaries[-1]
    rows.holds(f"memcheck of {NUM_STEPS} {kind} steps", is_clean, summaries[-1].strip("= "))


if __name__ == "__main__":
    training = Training(CASE, "cuda", uses_graphs=sys.argv[1] == "replayed")
    for _ in range(NUM_STEPS):
        training.step()
    training.pipeline.synchronize()
