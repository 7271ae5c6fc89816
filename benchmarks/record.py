"""One line of benchmarks/results.csv per figure of the scripts beside this file."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from meseta.telemetry.benchmark_history import PeerComparison, append_comparisons

ROOT = Path(__file__).resolve().parent.parent


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
    versions = {name: importlib.metadata.version(name) for name in packages}
    comparison = PeerComparison(
        benchmark=benchmark,
        case=case,
        metric=metric,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        versions=versions,
    )
    print(f"{benchmark:10} {case:28} {metric:22} {value:12,.4g} {unit:10} {peer} {peer_value:,.4g}  "
          f"x {comparison.ratio:.2f}")  # fmt: skip
    append_comparisons(ROOT / "benchmarks" / "results.csv", [comparison])
