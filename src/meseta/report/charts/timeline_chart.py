"""Chart of one step over time: stages of each rank, with transfers and copies in the rows below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median_low
from typing import NamedTuple

from meseta.report.charts.chart import Axis, make_axis
from meseta.report.charts.markup import coordinate, escape, svg, svg_text, tag
from meseta.spec.stages import STAGE_NAMES
from meseta.telemetry.formatting import format_bytes, format_count, format_quantity
from meseta.telemetry.timeline import (
    DEVICE_BYTES,
    IN_FLIGHT,
    INTER_HOST_BYTES,
    INTRA_HOST_BYTES,
    OUTSIDE_STAGES,
    TIMELINE_FILE,
    WAITING,
    Slice,
    Timeline,
    Track,
)

MAX_RANKS, MAX_ROWS = 4, 40
"""Maximum number of ranks, and maximum number of rows of transfers per rank. timeline.json contains all of them."""
WIDTH, MARGIN_LEFT, MARGIN_RIGHT = 1072.0, 190.0, 12.0
STAGE_HEIGHT, ROW_HEIGHT, RANK_GAP = 20.0, 12.0, 14.0
CHARACTER_WIDTH = 6.2
MIN_BOX_WIDTH = 0.5
"""Minimum width of a slice in pixels. Narrower slices are widened, or left out if they would overlap."""

RECEIVERS = {INTRA_HOST_BYTES: "to its host", INTER_HOST_BYTES: "to other hosts", DEVICE_BYTES: "to the device"}
"""Key of `Slice.args` -> receiver of these bytes in tooltips."""


class _DrawnSlice(NamedTuple):
    """Rectangle of one slice."""

    timeline_slice: Slice
    top: float
    height: float
    class_: str
    tooltip: str
    name: str = ""
    """Text inside the rectangle, shown if it fits."""


def timeline_section(timeline: Timeline | None) -> str:
    """Return the chart of the step with the median duration on rank 0, or an empty string if no step was profiled."""
    steps = [] if timeline is None else timeline.steps(0)
    if timeline is None or not steps:
        return ""
    median_ns = median_low(step.end_ns - step.begin_ns for step in steps)
    chosen = next(step for step in steps if step.end_ns - step.begin_ns == median_ns)
    num_more = len(timeline.ranks) - MAX_RANKS
    more = f", and {format_quantity(num_more, 'more rank')}" if num_more > 0 else ""
    intro = (
        f"Step {format_count(chosen.step)} has the median duration of the {format_quantity(len(steps), 'step')} "
        "recorded by --profile. The upper row of a rank shows its stages. The rows below show transfers and copies in "
        "progress, hatched while the rank waits for them. "
        f"{TIMELINE_FILE} contains all steps{more}; open it in ui.perfetto.dev."
    )
    return tag("h3", "A step over time") + tag("p", escape(intro)) + _step_chart(timeline, chosen)


def _step_chart(timeline: Timeline, step: Slice) -> str:
    axis = make_axis(
        [0.0, (step.end_ns - step.begin_ns) / 1e6], MARGIN_LEFT, WIDTH - MARGIN_RIGHT, num_ticks=8, widen=False
    )
    marks, y = list[str](), 0.0
    for rank in range(min(len(timeline.ranks), MAX_RANKS)):
        marks.append(svg_text(MARGIN_LEFT - 8, y + 14, f"rank {rank}", "row-name", "end"))
        stages = [box for track in timeline.select_tracks(rank, "stage") for box in _stage_boxes(track, y)]
        marks += _draw_row(axis, step, stages)
        y += STAGE_HEIGHT + 3
        tracks = [
            track
            for track in timeline.select_tracks(rank, "transfer")
            if any(_overlaps(step, one) for one in track.slices)
        ]
        for track in tracks[:MAX_ROWS]:
            marks.append(svg_text(MARGIN_LEFT - 8, y + 9, track.name.replace(IN_FLIGHT, ""), "tick", "end"))
            marks += _draw_row(axis, step, _transfer_boxes(track, y))
            y += ROW_HEIGHT
        y += RANK_GAP
    ticks = []
    for tick, name in zip(axis.ticks, axis.labels, strict=True):
        x = axis.to_pixel(tick)
        ticks.append(tag("path", d=f"M{coordinate(x)} 0V{coordinate(y - RANK_GAP + 4)}", class_="grid"))
        ticks.append(svg_text(x, y + 4, name if tick else "0 ms", anchor="middle"))
    lines = tag("path", d="M-1 5L5 -1M1 7L7 1", class_="hatch")
    hatching = tag("pattern", lines, id="waiting", width=6, height=6, patternUnits="userSpaceOnUse")
    title, children = f"Step {step.step} over time", [tag("defs", hatching), *ticks, *marks]
    return tag("div", svg(WIDTH, y + 10, title, *children, class_="chart timeline"), class_="scroll")


def _overlaps(step: Slice, one: Slice) -> bool:
    """Whether a slice overlaps a step."""
    return one.begin_ns < step.end_ns and one.end_ns > step.begin_ns


def _stage_boxes(track: Track, y: float) -> Iterator[_DrawnSlice]:
    if track.name == OUTSIDE_STAGES:
        class_, name = "stage-none", ""
    else:
        class_, name = f"stage-{track.name}" if track.name in STAGE_NAMES else "stage-spare-0", track.name
    for one in track.slices:
        yield _DrawnSlice(one, y, STAGE_HEIGHT, f"stage {class_}", track.name, name)


def _transfer_boxes(track: Track, y: float) -> Iterator[_DrawnSlice]:
    for one in track.slices:
        if one.name == WAITING:
            yield _DrawnSlice(one, y + 1, ROW_HEIGHT - 4, "waiting", f"{track.name}, waited for")
            continue
        sizes = [
            f"{format_bytes(one.args[key])} {receiver}"
            for key, receiver in RECEIVERS.items()
            if one.args.get(key, 0.0) > 0
        ]
        yield _DrawnSlice(one, y + 2, ROW_HEIGHT - 6, "under-way", ", ".join((track.name, *sizes)))


def _draw_row(axis: Axis, step: Slice, boxes: Iterable[_DrawnSlice]) -> Iterator[str]:
    """Draw the slices of one row, clipped to the step."""
    inside = sorted(
        (box for box in boxes if _overlaps(step, box.timeline_slice)), key=lambda box: box.timeline_slice.begin_ns
    )
    drawn_to: dict[str, float] = {}
    for box in inside:
        begin, end = (axis.to_pixel((min(max(ns, step.begin_ns), step.end_ns) - step.begin_ns) / 1e6)
                      for ns in (box.timeline_slice.begin_ns, box.timeline_slice.end_ns))  # fmt: skip
        # Waits are drawn on top of transfers, so both may have the same position.
        row = "waiting" if box.class_ == "waiting" else ""
        # Leave out a narrow slice that would overlap the previous one.
        if end - begin < MIN_BOX_WIDTH and begin < drawn_to.get(row, 0.0):
            continue
        drawn_to[row] = max(end, begin + MIN_BOX_WIDTH)
        hover = tag(
            "title", escape(f"{box.tooltip}: {(box.timeline_slice.end_ns - box.timeline_slice.begin_ns) / 1e6:.3g} ms")
        )
        size = {"width": max(end - begin, MIN_BOX_WIDTH), "height": box.height}
        hatched = {"fill": "url(#waiting)"} if box.class_ == "waiting" else {}
        yield tag("rect", hover, x=begin, y=box.top, class_=box.class_, **size, **hatched)
        if box.name and end - begin > CHARACTER_WIDTH * len(box.name) + 6:
            yield svg_text((begin + end) / 2, box.top + box.height / 2 + 4, box.name, "in-box", "middle")
