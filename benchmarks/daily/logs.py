"""Synthetic logs whose ids and effects change from day to day."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.processes import run_meseta

CHURN, DRIFT = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class DailyLog:
    """Log of `num_days` files, which is written when a file is first used. Days are counted from 1."""

    folder: Path
    seed: int
    num_days: int
    rows_per_day: int
    scale: float
    """Factor on the cardinalities of Criteo."""

    def file(self, day: int) -> Path:
        """Return the rows of a day."""
        self._write()
        return self.folder / f"day_{day - 1}.tsv"

    def best_ne(self, day: int) -> float:
        """Return the NE of the true probabilities of a day."""
        self._write()
        files = json.loads(self._teacher.read_text())["files"]
        return float(files[self.file(day).name]["ne"])

    @property
    def _teacher(self) -> Path:
        return self.folder / "teacher.json"

    def _write(self) -> None:
        if self._teacher.exists():
            return
        options = {
            "out": self.folder, "rows": self.num_days * self.rows_per_day, "days": self.num_days, "churn": CHURN,
            "drift": DRIFT, "seed": self.seed, "scale": self.scale,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        run_meseta("data", "synth", "--force", *words)
