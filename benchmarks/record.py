"""One line of benchmarks/results.csv per figure: what, how much, beside whom, on what."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["date", "commit", "benchmark", "case", "metric", "value", "unit", "peer", "ratio", "hardware", "versions"]


def record(
    benchmark: str,
    case: str,
    metric: str,
    value: float,
    unit: str,
    *,
    peer: str,
    peer_value: float,
    packages: Sequence[str] = ("torch",),
) -> None:
    """Print one comparison and append it; the ratio is above 1 where we are better (a time is better when smaller)."""
    ratio = peer_value / value if unit in ("s", "MB") else value / peer_value
    print(f"{benchmark:10} {case:28} {metric:22} {value:12,.4g} {unit:10} {peer} {peer_value:,.4g}  x {ratio:.2f}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    row = [datetime.date.today().isoformat(), commit.stdout.strip(), benchmark, case, metric, f"{value:.6g}", unit]
    row += [
        f"{peer} {peer_value:.6g} {unit}",
        f"{ratio:.2f}",
        hardware(),
        f"python {platform.python_version()} {versions}",
    ]
    path = ROOT / "benchmarks" / "results.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([COLUMNS, row] if is_new else [row])


def hardware() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()
