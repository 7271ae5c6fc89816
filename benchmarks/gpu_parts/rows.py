"""Rows of the table of gpu_checks.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Result = Literal["met", "missed", "skipped", "measured"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result of a check."""

    quantity: str
    value: float | str
    """Value, or the reason why there is none."""
    unit: str = ""
    limit: str = ""
    result: Result = "measured"

    def cells(self) -> Sequence[str]:
        """Return the cells of a line in Markdown."""
        value = self.value if isinstance(self.value, str) else f"{self.value:,.4g} {self.unit}".rstrip()
        # Messages may have characters that end a cell or a row.
        return (self.quantity, " ".join(value.replace("|", "/").split()), self.limit, self.result)


class RowWriter:
    """Appends rows to a file as they are measured, so that a check that is killed loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def at_most(self, quantity: str, value: float, limit: float, unit: str) -> None:
        self._add_limited(quantity, value, unit, f"<= {limit:,g}", value <= limit)

    def at_least(self, quantity: str, value: float, limit: float, unit: str) -> None:
        self._add_limited(quantity, value, unit, f">= {limit:,g}", value >= limit)

    def holds(self, quantity: str, is_met: bool, value: str) -> None:
        """Add a row about a condition. `value` describes the observation."""
        self._add(Row(quantity=quantity, value=value, result="met" if is_met else "missed"))

    def measured(self, quantity: str, value: float | str, unit: str = "") -> None:
        """Add a row without a limit."""
        self._add(Row(quantity=quantity, value=value, unit=unit))

    def skip(self, quantity: str, reason: str) -> None:
        self._add(Row(quantity=quantity, value=reason, result="skipped"))

    def _add_limited(self, quantity: str, value: float, unit: str, limit: str, is_met: bool) -> None:
        finite = value if math.isfinite(value) else str(value)  # JSON has no other numbers.
        self._add(Row(quantity=quantity, value=finite, unit=unit, limit=limit, result="met" if is_met else "missed"))

    def _add(self, row: Row) -> None:
        print(*row.cells(), flush=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, which may not exist. An incomplete last line is ignored."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]
