"""Tables, times and memory of many small days, with retired rows and without."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.measure_command import measure_command
from common.processes import MESETA, script_environment
from common.result_store import ResultStore
from common.tables import table

from daily.logs import DailyLog
from daily.runs import FIRST_DAY, ONE_RUN, is_complete
from meseta.data import Dataset
from meseta.report.charts.chart import Series, line_chart
from meseta.report.charts.markup import escape, html_document, tag
from meseta.system.files import write_atomic

RETIRE_AFTER = 5
RETIRED, KEPT = "retired", "kept"
MODES: Mapping[str, tuple[object, ...]] = {RETIRED: ("--retire-after", RETIRE_AFTER), KEPT: ()}
"""Options of the preparation by what happens to rows of values that no longer occur."""
QUANTITIES = {
    "rows": ("rows of tables", 1.0),
    "prepare_processor_s": ("prepare, processor s", 1.0),
    "load_processor_s": ("load, processor s", 1.0),
    "prepare_peak_bytes": ("prepare, peak MB", 1e6),
    "train_peak_bytes": ("train, peak MB", 1e6),
}
"""Title and unit of each quantity."""
MAX_RATIO, EARLIER_SHARE = 1.2, 2 / 3
"""Limit on a quantity of the last day, relative to the day at this share of all days."""
SMOOTHED_DAYS = 3
"""Days whose median is compared, which end with the compared one. Times vary from run to run."""
STYLE = """
svg .retired-line { stroke: var(--test); } svg .retired-label { fill: var(--test); font-weight: 600; }
svg .kept-line { stroke: var(--other); } svg .kept-label { fill: var(--other); font-weight: 600; }
"""


class ManyDays:
    """Chains of days that are prepared in advance. Folders are made again if a later day needs them."""

    def __init__(self, log: DailyLog, store: ResultStore, folder: Path, settings: Sequence[str]) -> None:
        self._log, self._store, self._folder, self._settings = log, store, folder, settings

    def measure(self) -> None:
        """Measure all days after the first one, in both modes in turn."""
        for day in range(FIRST_DAY + 1, self._log.num_days + 1):
            for mode in MODES:
                self._store.get_and_print(self._key(mode, day), lambda m=mode, d=day: self._run(m, d))  # type: ignore[misc]

    def print(self, page: Path) -> bool:
        """Print the table and write the page. Return whether no quantity with retired rows grows beyond the limit."""
        lines = [(day, mode, result) for day in self._days() for mode in MODES if (result := self._find(mode, day))]
        rows = [
            [day, mode, *(_format(key, result[key] / unit) for key, (_, unit) in QUANTITIES.items())]
            for day, mode, result in lines
        ]
        table("Many days", ["day", "old rows", *(title for title, _ in QUANTITIES.values())], rows)
        self._write_page(page)
        return self._print_ratios()

    def _days(self) -> range:
        return range(FIRST_DAY + 1, self._log.num_days + 1)

    def _print_ratios(self) -> bool:
        last = self._log.num_days
        earlier = max(round(EARLIER_SHARE * last), FIRST_DAY + 1)
        rows, is_met = [], True
        for key, (title, _) in QUANTITIES.items():
            ratios = {mode: self._median(mode, key, last) / self._median(mode, key, earlier) for mode in MODES}
            rows.append([title, *(f"{ratios[mode]:.3f}" for mode in MODES)])
            is_met &= ratios[RETIRED] <= MAX_RATIO  # Not met if a day is missing, since the ratio is NaN.
        title = f"Day {last} relative to day {earlier} (medians of {SMOOTHED_DAYS} days), limit {MAX_RATIO} if retired"
        table(title, ["", *MODES], rows)
        return is_met

    def _median(self, mode: str, key: str, day: int) -> float:
        first = day if key == "rows" else max(day - SMOOTHED_DAYS, FIRST_DAY) + 1
        results = [self._find(mode, one) for one in range(first, day + 1)]
        values = [result[key] for result in results if result is not None]
        return statistics.median(values) if values else float("nan")

    def _find(self, mode: str, day: int) -> Mapping[str, Any] | None:
        return self._store.find(self._key(mode, day))

    def _key(self, mode: str, day: int) -> str:
        return f"thirty_days/{mode}/{day}"

    def _run_dir(self, mode: str, day: int) -> Path:
        return self._folder / ("first" if day == FIRST_DAY else f"{mode}-{day}")

    def _run(self, mode: str, day: int) -> dict[str, float]:
        """Prepare and train a day, after the days before it if they are missing."""
        run_dir, parent = self._run_dir(mode, day), self._run_dir(mode, day - 1)
        data, result = self._folder / f"{run_dir.name}-data", self._folder / "load.json"
        if not is_complete(parent):
            if day - 1 == FIRST_DAY:
                self._train_first(parent)
            else:
                self._run(mode, day - 1)
        for folder in (run_dir, data):
            shutil.rmtree(folder, ignore_errors=True)
        prepared = measure_command(
            [*MESETA, "prepare", self._log.file(day), "--like", parent, "--grow", "--out", data, *MODES[mode]]
        )
        trained = measure_command(
            [sys.executable, "-m", "daily.timed_training", result, "train", "--start-from", parent, f"data.dir={data}",
             f"run_dir={run_dir}"],
            PYTHONPATH=script_environment()["PYTHONPATH"],
        )  # fmt: skip
        return {
            "rows": sum(feature.num_embeddings for feature in Dataset.load(data).sparse),
            "prepare_processor_s": prepared.processor_s,
            "prepare_peak_bytes": prepared.peak_bytes,
            "train_processor_s": trained.processor_s,
            "train_peak_bytes": trained.peak_bytes,
            **json.loads(result.read_text()),
        }

    def _train_first(self, run_dir: Path) -> None:
        shutil.rmtree(run_dir, ignore_errors=True)
        data = ("--data", self._log.file(FIRST_DAY))
        measure_command([*MESETA, "train", *data, f"run_dir={run_dir}", *ONE_RUN, *self._settings])

    def _write_page(self, page: Path) -> None:
        """Write a page with a chart of each quantity."""
        body = tag("div", *self._charts(), class_="grid")
        write_atomic(page, html_document("Many days", tag("h1", "Many days"), body, style=STYLE))
        print(f"charts: {page}")

    def _charts(self) -> Iterator[str]:
        for key, (title, unit) in QUANTITIES.items():
            lines = []
            for mode in MODES:
                results = [(float(day), self._find(mode, day)) for day in self._days()]
                points = [(day, result and result[key] / unit) for day, result in results]
                lines.append(Series(name=mode, points=points, class_=mode))
            chart = line_chart(title, lines, self._log.num_days, include_zero=True, x_name="day")
            yield tag("figure", tag("figcaption", escape(title)), chart)


def _format(key: str, value: float) -> str:
    return f"{value:,.0f}" if key == "rows" else f"{value:.4g}"
