"""History of benchmark results in results.csv, each compared with another program."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meseta.system import git_version, hardware_summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.csv"

HISTORY_COLUMNS = (
    "date", "commit", "benchmark", "case", "metric", "value", "unit", "peer", "ratio", "hardware", "versions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PeerComparison:
    benchmark: str
    case: str
    metric: str
    value: float
    unit: str
    peer: str
    peer_value: float
    versions: Mapping[str, str]

    @property
    def ratio(self) -> float:
        """Ratio of the two values, above 1 if Meseta is better."""
        # Rates are better when larger. All other units are better when smaller.
        better_when_small = self.unit in ("s", "ms", "s/GB", "MB", "GB", "of one", "of theirs", "misses a lookup")
        return self.peer_value / self.value if better_when_small else self.value / self.peer_value


def append_comparisons(path: Path, comparisons: Sequence[PeerComparison]) -> None:
    is_new = not path.exists()
    about = (datetime.date.today().isoformat(), git_version()), hardware_summary()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(HISTORY_COLUMNS)
        writer.writerows(_row(comparison, *about) for comparison in comparisons)


_settings = {"record": True}


def disable_recording() -> None:
    """Let `record` print only."""
    _settings["record"] = False


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
    """Print a comparison, and append it to results.csv unless recording is disabled."""
    comparison = PeerComparison(
        benchmark=benchmark,
        case=case,
        metric=metric,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        versions={name: importlib.metadata.version(name) for name in packages},
    )
    print(
        f"{benchmark:10} {case:28} {metric:22} {value:12,.4g} {unit:10} {peer} {peer_value:,.4g}  "
        f"x {comparison.ratio:.2f}"
    )
    if _settings["record"]:
        append_comparisons(RESULTS, [comparison])


def _row(c: PeerComparison, when: tuple[str, str], machine: str) -> list[str]:
    versions = " ".join(f"{name} {version}" for name, version in c.versions.items())
    return [
        *when,
        c.benchmark,
        c.case,
        c.metric,
        f"{c.value:.6g}",
        c.unit,
        f"{c.peer} {c.peer_value:.6g} {c.unit}",
        f"{c.ratio:.2f}",
        machine,
        f"python {platform.python_version()} {versions}",
    ]
