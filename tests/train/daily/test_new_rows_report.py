"""The report page of a run that continues from another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meseta.report import write_report
from train.test_report import HOSTILE, Page, check_numbers, check_self_contained, make_run

HOUR = "2026-11-27T{:02}"


def metrics(ne: float, num_samples: int = 1000) -> dict[str, Any]:
    return {"num_samples": num_samples, "num_positives": 200, "ne": ne, "auc": 1.5 - ne, "calibration": 1.01}


def epoch(ne: float, hours: list[str]) -> dict[str, Any]:
    groups = {"with_new_ids": metrics(ne + 0.05, 100), "without_new_ids": metrics(ne - 0.01, 900)}
    return {"total": metrics(ne), **groups, "by_hour": {hour: metrics(ne + 0.001 * len(hour)) for hour in hours}}


DRIFT = {
    "num_rows": 1000,
    "dense": {
        "age": {"mean_shift": -0.75, "std_ratio": 1.25, "fill_share": 0.125, "fill_share_before": 0.25},
        HOSTILE: {"mean_shift": 0.25, "std_ratio": 1.0, "fill_share": 0.0},
    },
    "sparse": {"user": {"new_row_share": 0.17, "new_lookup_share": 0.19, "num_lookups": 5, "num_added": 4321}},
    "labels": {"label": {"rate": 0.21, "rate_before": 0.31}},
    "large": [f"the mean of {HOSTILE} has shifted"],
}


def continued_run(folder: Path, hours: list[str], **changes: Any) -> Path:
    run = make_run(folder)
    summary = json.loads((run / "summary.json").read_text())
    del summary["test"]
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    parts = {"test_first": epoch(0.8711, hours), "progressive": epoch(0.8622, hours), "drift": DRIFT, **changes}
    summary["continued"] = {"parent": "runs/9", "checkpoint": "step_000100", **parts}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def render(run: Path) -> Page:
    page = Page(write_report(run).read_text(encoding="utf-8"))
    check_self_contained(page)
    check_numbers(page)
    return page


def charts(page: Page) -> list[str | None]:
    return [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]


def num_dots(page: Page, class_: str) -> int:
    return sum(tag == "circle" and attributes.get("class") == class_ for tag, attributes in page.tags)


def test_metrics_on_new_rows_are_the_headline(tmp_path: Path) -> None:
    page = render(continued_run(tmp_path / "run", [HOUR.format(k) for k in (0, 1, 5)] + ["unknown"]))
    assert page.texts.index("test first NE") < page.texts.index("progressive NE") < page.texts.index("samples/s")
    assert "test AUC" not in page.texts
    for text in ("0.8711", "0.8622", "new ids 0.9122, others 0.8522", "progressive, with new ids"):
        assert text in page.texts
    assert "The run continues from runs/9, checkpoint step_000100." in page.text
    assert "Hours since 2026-11-27 00:00 UTC." in page.texts
    assert {"Normalized entropy by hour", "AUC by hour", "Calibration by hour"} <= set(charts(page))
    assert num_dots(page, "test-dot") == num_dots(page, "other-dot") == 3 * 3  # The rows without a time have none.
    for text in ("-0.75", "1.25", "12% (before 25%)", "17%", "19%", "4,321", "21%", "31%"):
        assert text in page.texts
    assert any("has shifted" in text and "<script>" in text for text in page.texts)


def test_hours_of_the_day(tmp_path: Path) -> None:
    page = render(continued_run(tmp_path / "run", ["00", "13", "23", "unknown"]))
    assert "Hours of the day in UTC." in page.texts
    assert num_dots(page, "test-dot") == 9


@pytest.mark.parametrize("hours", [[], [HOUR.format(3)], ["2026-02-31T00", HOUR.format(3)], ["later"]])
def test_too_few_hours_are_not_drawn(tmp_path: Path, hours: list[str]) -> None:
    page = render(continued_run(tmp_path / "run", hours))
    assert "AUC by hour" not in charts(page)
    assert "New rows" in page.texts


def test_parts_may_be_missing(tmp_path: Path) -> None:
    page = render(continued_run(tmp_path / "run", [], test_first=None, drift=None))
    assert "progressive NE" in page.texts
    assert "test first NE" not in page.texts
    assert "Drift" not in page.texts
    assert "New rows" not in render(make_run(tmp_path / "plain")).texts


def test_a_binned_auc_has_its_bound(tmp_path: Path) -> None:
    binned = epoch(0.8622, [])
    binned["total"]["auc_error_bound"] = 0.00025
    page = render(continued_run(tmp_path / "run", [], progressive=binned))
    assert "The AUC of progressive is binned, with an error of at most 0.00025." in page.texts


def test_history_is_drawn_by_run(tmp_path: Path) -> None:
    run = continued_run(tmp_path / "run", [])
    lines: list[dict[str, Any]] = [{"run": "first", "num_rows": 777, "seconds": 31.0}]
    for k in range(2, 16):
        lines.append({"run": f"day {k}", "test_first": epoch(0.8 + k / 100, []), "progressive": epoch(0.7, [])})
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render(run)
    assert "AUC by run" in charts(page)
    assert num_dots(page, "test-dot") == num_dots(page, "other-dot") == 3 * 14
    assert "day 15" in page.texts
    assert "day 3" not in page.texts
    assert "The last 12 of 15 runs." in page.texts


def test_a_damaged_history_is_named(tmp_path: Path) -> None:
    run = continued_run(tmp_path / "run", [])
    (run / "history.jsonl").write_text("{")
    page = render(run)
    assert any(text.startswith("history.jsonl: ") and "line 1: it is not JSON" in text for text in page.texts)
