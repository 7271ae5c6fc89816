"""History of benchmark results in a CSV file, each compared with another program."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meseta.system.environment import git_version, hardware_summary

HISTORY_COLUMNS = (
    "date",
    "commit",
    "benchmark",
    "case",
    "metric",
    "value",
    "unit",
    "peer",
    "ratio",
    "hardware",
    "versions",
)


@dataclass(frozen=True, kw_only=True)
class PeerComparison:
    """Measurement of Meseta and of another program in the same benchmark run."""

    benchmark: str
    """Name of the benchmark, such as 'ops', 'e2e' or 'ingest'."""
    case: str
    """Measured case, for example configuration, dtype and number of threads."""
    metric: str
    value: float
    unit: str
    peer: str
    peer_value: float
    versions: Mapping[str, str]
    """Versions of the packages of both programs."""

    @property
    def ratio(self) -> float:
        """Ratio of the two values, above 1 if Meseta is better."""
        # Rates are better when larger. All other units are better when smaller.
        better_when_small = self.unit in ("s", "ms", "s/GB", "MB", "GB", "of one", "of theirs", "misses a lookup")
        return self.peer_value / self.value if better_when_small else self.value / self.peer_value


def append_comparisons(path: Path, comparisons: Sequence[PeerComparison]) -> None:
    """Append a line per comparison. A new file starts with the column names."""
    is_new = not path.exists()
    about = (datetime.date.today().isoformat(), git_version()), hardware_summary()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(HISTORY_COLUMNS)
        writer.writerows(_row(comparison, *about) for comparison in comparisons)


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
