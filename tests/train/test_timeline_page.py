"""A profiled step in the report: the choice of the step, its proportions, and untrusted files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meseta.report import write_report
from meseta.report.charts.timeline_chart import MARGIN_LEFT, MARGIN_RIGHT, WIDTH, timeline_section
from meseta.report.record import read_run
from meseta.system.files import format_json
from meseta.telemetry.span import Span, TransferSpan
from meseta.telemetry.timeline import RankClock, Timeline, make_rank_tracks, to_trace_document


def three_steps(num_ranks: int = 2) -> Timeline:
    """Return steps of 30, 10 and 20 ms. The last one has 5 ms of lookup, and ids that it waits for during 4 of 8 ms."""
    spans = [
        Span("step", 0, 1.0, 1.030, 0.0),
        Span("step", 1, 1.040, 1.050, 0.0),
        Span("lookup", 2, 1.065, 1.070, 0.0),
        Span("step", 2, 1.060, 1.080, 0.005),
    ]
    sent = [TransferSpan("ids", 2, 1, 2e6, 0.0, 1.068, 1.076, 0.004)]
    places = (RankClock("a", 0.0, 0.0),) * num_ranks
    return Timeline(1, 3, places, tuple(t for rank in range(num_ranks) for t in make_rank_tracks(rank, spans, sent)))


def boxes(markup: str, class_: str) -> list[tuple[float, float]]:
    """Return the horizontal extent of the rectangles of a class, in pixels."""
    matches = re.findall(rf'<rect x="([\d.]+)" y="[\d.]+" class="{class_}" width="([\d.]+)"', markup)
    return [(float(x), float(x) + float(width)) for x, width in matches]


def test_the_step_of_median_length_is_drawn_in_proportion() -> None:
    markup = timeline_section(three_steps())
    assert "Step 3 has the median duration of the 3 steps" in markup and "more rank" not in markup
    ms = (WIDTH - MARGIN_RIGHT - MARGIN_LEFT) / 20
    for class_, begin, end in (("stage stage-lookup", 5, 10), ("under-way", 8, 16), ("waiting", 12, 16)):
        drawn = boxes(markup, class_)
        assert drawn == [pytest.approx((MARGIN_LEFT + begin * ms, MARGIN_LEFT + end * ms), abs=0.02)] * 2
    assert len(boxes(markup, "stage stage-none")) == 4
    assert "ids in flight, 2.00 MB to its host: 8 ms" in markup


def test_ranks_that_are_not_drawn_are_counted() -> None:
    markup = timeline_section(three_steps(6))
    assert "contains all steps, and 2 more ranks" in markup and "rank 3" in markup and "rank 4" not in markup
    assert timeline_section(None) == ""


def test_many_slices_of_a_step_give_a_small_picture() -> None:
    spans = [Span("lookup", 0, 1 + k / 1e5, 1 + (k + 0.5) / 1e5, 0.0) for k in range(20_000)]
    tracks = make_rank_tracks(0, [*spans, Span("step", 0, 1.0, 1.2, 0.1)], [])
    markup = timeline_section(Timeline(1, 1, (RankClock("a", 0.0, 0.0),), tuple(tracks)))
    assert len(markup) < 500_000 and boxes(markup, "stage stage-lookup")


def run_with(folder: Path, content: str) -> Path:
    (folder / "config.yaml").write_text("seed: 1\n")
    line = {"kind": "train", "step": 3, "num_samples": 30, "stages_s": {"lookup": 0.005}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "timeline.json").write_text(content)
    return folder


def test_the_page_shows_the_timeline(tmp_path: Path) -> None:
    run = run_with(tmp_path, format_json(to_trace_document(three_steps())))
    assert read_run(run).timeline is not None
    assert "A step over time" in write_report(run).read_text()
    (run / "timeline.json").unlink()
    assert "A step over time" not in (page := write_report(run).read_text()) and "timeline.json" not in page


def changed(**changes: Any) -> str:
    document = to_trace_document(three_steps())
    for event in document["traceEvents"]:
        event.update({key: value for key, value in changes.items() if key in event or event["ph"] == "X"})
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "input should be a valid dictionary"),
        ("{}", "key 'otherData': field required"),
        (changed(ts=-1.0), "key 'traceEvents."),
        (changed(ts=float("nan")), "key 'traceEvents."),
        (changed(dur=1e300), "key 'traceEvents."),
        (changed(pid="x"), "key 'traceEvents."),
        (changed(args={"step": -3}), "key 'traceEvents."),
        (
            json.dumps({**to_trace_document(three_steps()), "otherData": {"format": "meseta.timeline/9"}}),
            "key 'otherData",
        ),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str, problem: str) -> None:
    run = run_with(tmp_path, content)
    page = write_report(run).read_text()
    assert f"timeline.json: {problem}".replace("'", "&#x27;") in page and "A step over time" not in page


@pytest.mark.parametrize(
    "changes", [{"name": "<script>"}, {"cat": "<script>"}, {"pid": 99}, {"dur": 0.0}, {"ts": 1e15}, {"args": {}}]
)
def test_an_untrusted_file_is_drawn_or_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = run_with(tmp_path, changed(**changes))
    assert "<script>" not in write_report(run).read_text()
