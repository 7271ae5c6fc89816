"""Figures as lines of a CSV file that keeps history: what, how much, beside whom, on what."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meseta.machine.environment import git_version, hardware_summary

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
    """One figure beside another of the same run."""

    benchmark: str
    """'ops', 'e2e', 'ingest', ..."""
    case: str
    """What was measured: configuration, dtype, threads."""
    metric: str
    value: float
    unit: str
    peer: str
    """Whose figure stands beside it."""
    peer_value: float
    versions: Mapping[str, str]
    """Package -> version, of both."""

    @property
    def ratio(self) -> float:
        """Above 1 where ours is better: times, sizes and costs are better when smaller, rates when larger."""
        better_when_small = self.unit in ("s", "ms", "s/GB", "MB", "GB", "of one", "of theirs", "misses a lookup")
        return self.peer_value / self.value if better_when_small else self.value / self.peer_value


def append_comparisons(path: Path, comparisons: Sequence[PeerComparison]) -> None:
    """Add a line per comparison; a new file begins with the names of the columns."""
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
