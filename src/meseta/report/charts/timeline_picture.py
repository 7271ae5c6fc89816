"""One step as a picture: a row of stages for each rank, and below it what was under way meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from meseta.report.charts.axis import Axis, make_axis
from meseta.report.charts.markup import label, number, picture, tag, text
from meseta.spec.stages import STAGE_NAMES
from meseta.telemetry.shown import byte_size, plural
from meseta.telemetry.timeline import IN_NO_STAGE, TIMELINE_NAME, WAITING, Slice, Timeline, Track

MAX_RANKS = 4
"""Ranks that are drawn; the file has all."""
WIDTH, LEFT, RIGHT = 1072.0, 190.0, 12.0
STAGE_HEIGHT, LINE_HEIGHT, GAP = 20.0, 12.0, 14.0
NAME_WIDTH = 6.2
"""Of a character, in pixels."""


def timeline_section(timeline: Timeline | None) -> str:
    """The step of median length on rank 0; an empty string where none was profiled."""
    steps = [] if timeline is None else timeline.steps(0)
    if timeline is None or not steps:
        return ""
    median_ns = median_low(step.end_ns - step.begin_ns for step in steps)
    chosen = next(step for step in steps if step.end_ns - step.begin_ns == median_ns)
    num_more = len(timeline.ranks) - MAX_RANKS
    intro = (
        f"Step {chosen.step:,}, the one of median length of the {plural(len(steps), 'step')} that --profile has kept. "
        "The upper row of a rank is what it computes; below is what was under way meanwhile, hatched where the rank "
        f"waited for it. {TIMELINE_NAME} has all steps"
        + (f", and {plural(num_more, 'more rank')}" if num_more > 0 else "")
        + ": open it in ui.perfetto.dev, which keeps it on your machine."
    )
    return tag("h3", "A step over time") + tag("p", text(intro)) + _step_picture(timeline, chosen)


def _step_picture(timeline: Timeline, step: Slice) -> str:
    axis = make_axis([0.0, (step.end_ns - step.begin_ns) / 1e6], LEFT, WIDTH - RIGHT, num_ticks=8, widen=False)
    marks, y = list[str](), 0.0
    for rank in range(min(len(timeline.ranks), MAX_RANKS)):
        rows = [track for track in timeline.of(rank, "transfer") if any(_in(step, one) for one in track.slices)]
        marks.append(label(LEFT - 8, y + 14, f"rank {rank}", "row-name", "end"))
        stages = [(track, one) for track in timeline.of(rank, "stage") for one in track.slices if _in(step, one)]
        marks += [_box(axis, step, one, y, STAGE_HEIGHT, _stage_class(track), one.name) for track, one in stages]
        y += STAGE_HEIGHT + 3
        for track in rows:
            marks += _transfer_row(axis, step, track, y)
            y += LINE_HEIGHT
        y += GAP
    ticks = []
    for tick, name in zip(axis.ticks, axis.labels, strict=True):
        x = axis.place(tick)
        ticks.append(tag("path", d=f"M{number(x)} 0V{number(y - GAP + 4)}", class_="grid"))
        ticks.append(label(x, y + 4, name if tick else "0 ms", anchor="middle"))
    hatching = tag(
        "pattern",
        tag("path", d="M-1 5L5 -1M1 7L7 1", class_="hatch"),
        id="waiting",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
    )
    return tag(
        "div",
        picture(
            WIDTH, y + 10, f"Step {step.step} over time", tag("defs", hatching), *ticks, *marks, class_="chart timeline"
        ),
        class_="scroll",
    )


def _in(step: Slice, one: Slice) -> bool:
    """Whether some of a slice lies in a step."""
    return one.begin_ns < step.end_ns and one.end_ns > step.begin_ns


def _stage_class(track: Track) -> str:
    if track.name == IN_NO_STAGE:
        return "stage stage-none"
    return f"stage stage-{track.name}" if track.name in STAGE_NAMES else "stage stage-spare-0"


def _transfer_row(axis: Axis, step: Slice, track: Track, y: float) -> Iterator[str]:
    yield label(LEFT - 8, y + 9, track.name.replace(" under way", ""), "tick", "end")
    for one in (one for one in track.slices if _in(step, one)):
        if one.name == WAITING:
            yield _box(axis, step, one, y + 1, LINE_HEIGHT - 4, "waiting", f"{track.name}, waited for")
            continue
        sent = " and ".join(
            f"{byte_size(one.figures[name])} {name.removeprefix('bytes ')}"
            for name in ("bytes to its host", "bytes to other hosts")
            if one.figures.get(name)
        )
        yield _box(axis, step, one, y + 2, LINE_HEIGHT - 6, "under-way", f"{one.name}, {sent or 'nothing'} sent")


def _box(axis: Axis, step: Slice, one: Slice, y: float, height: float, class_: str, name: str) -> str:
    """A slice, cut where the step ends."""
    begin, end = (axis.place((min(max(ns, step.begin_ns), step.end_ns) - step.begin_ns) / 1e6)
                  for ns in (one.begin_ns, one.end_ns))  # fmt: skip
    milliseconds = (one.end_ns - one.begin_ns) / 1e6
    hover = tag("title", text(f"{name}: {milliseconds:.3g} ms"))
    box = tag("rect", hover, x=begin, y=y, width=max(end - begin, 0.4), height=height, class_=class_)
    has_room = class_.startswith("stage") and end - begin > NAME_WIDTH * len(name) + 6
    return box + (label((begin + end) / 2, y + height / 2 + 4, name, "in-box", "middle") if has_room else "")
