"""A plan before its run, as a page: what every rank will do and hold, and why every table lies where it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meseta.machine.files import write_whole
from meseta.planner import Planned
from meseta.planner.explain.difference import spans
from meseta.planner.explain.gains import gain_heads, gain_rows, gains
from meseta.planner.explain.hidden import HIDDEN_HEADS, hidden_rows, hidden_title
from meseta.planner.explain.reasons import Reason
from meseta.planner.explain.room import fullest_ranks
from meseta.report.charts.chart import row_bars
from meseta.report.charts.markup import table, tag, text
from meseta.report.charts.plan_picture import plan_boxes
from meseta.report.document import document
from meseta.report.stages import stage_colour
from meseta.spec.stages import COMPONENTS, LABELS, Component, stages_of
from meseta.spec.tiers import DISK, HBM, HOST, MEMORIES, Memory
from meseta.telemetry.shown import byte_size, count, plural, share, short

MAX_DRAWN = 64
"""Ranks that are drawn; of more, the fullest and the busiest."""


def write_planned(planned: Planned, found: Sequence[Reason], path: Path, note: str | None = None) -> Path:
    """Write the page, with a `note` about the machines, and return its path. Raises MesetaError where it cannot be
    written."""
    title = f"Plan of {plural(len(planned.plan.tables), 'table')} on {plural(planned.plan.num_ranks, 'rank')}"
    ranks = planned.prediction.foremost_ranks(MAX_DRAWN)
    parts = [
        tag("h1", text(title)),
        _headline(planned),
        tag("p", text(note)) if note else "",
        tag("h2", "Time of a step"),
        _legend(),
        _times(planned, ranks),
    ]
    parts += [*_hidden(planned), *_gains(planned), tag("h2", "Memory"), _memory(planned, ranks)]
    if planned.plan.num_ranks <= MAX_DRAWN:
        boxes = plan_boxes(planned.plan)
        parts += [tag("h2", "Where the rows lie"), boxes] if boxes else []
    parts += [tag("h2", "Tables"), _tables(found)]
    write_whole(path, document(title, *parts))
    return path


def _headline(planned: Planned) -> str:
    step_s, bound = planned.prediction.step_s, planned.bound
    samples = planned.problem.workload.batch_size / step_s
    has_networks = planned.problem.cost_model.neural is not None
    alone = ", by the constants alone, without the networks that correct them" if has_networks else ""
    lines = [
        f"A step is predicted to take {1e3 * step_s:.4g} ms, {short(samples)} samples/s; rank "
        f"{planned.prediction.bottleneck} has the most lookup and update.",
        f"No plan of these schemes takes less than {1e3 * bound.step_s:.4g} ms ({bound.reason}){alone}; this one is "
        f"{share(bound.gap(planned.priced_s))} above that.",
    ]
    return "".join(tag("p", text(line)) for line in lines)


def _colour(name: Component) -> str:
    """That of the first stage which a predicted part is made of."""
    return stage_colour((), stages_of(name)[0])


def _legend() -> str:
    return tag("p", *(tag("span", class_=f"swatch {_colour(name)}") + text(f"{LABELS[name]} ") for name in COMPONENTS))


def _times(planned: Planned, ranks: Sequence[int]) -> str:
    seconds = planned.prediction.seconds
    rows = [
        (f"rank {rank}", [(LABELS[name], _colour(name), 1e3 * float(seconds[name][rank])) for name in COMPONENTS])
        for rank in ranks
    ]
    return row_bars("Milliseconds of a step by rank and component", rows, "ms")


def _hidden(planned: Planned) -> list[str]:
    """A table of what each transfer is waited for; nothing where none is hidden."""
    rows = [[text(cell) for cell in cells] for cells in hidden_rows(planned.prediction)]
    if not rows or not planned.problem.workload.overlap:
        return []
    intro = tag("p", text(f"Predicted, {hidden_title(planned)}."))
    return [tag("h2", "Transfers"), intro, table(list(HIDDEN_HEADS), rows, {1, 2, 3}, "compact")]


def _gains(planned: Planned) -> list[str]:
    """A table of what each codec would make of the step; nothing on one rank."""
    found = gains(planned)
    if not found:
        return []
    heads = gain_heads(found)
    rows = [[text(cell) for cell in cells] for cells in gain_rows(found)]
    intro = text("Predicted, all tables where they are; * as chosen.")
    return [tag("h2", "Codecs"), tag("p", intro), table(heads, rows, set(range(1, len(heads))), "compact")]


def _memory(planned: Planned, ranks: Sequence[int]) -> str:
    tiers = [(tier, planned.prediction.peak_bytes(tier)) for tier in MEMORIES]
    colours: dict[Memory, str] = {HBM: "stage-lookup", HOST: "stage-backward", DISK: "stage-update"}
    used = [(tier, held) for tier, held in tiers if held.any()]
    rows = [(f"rank {rank}", [(tier, colours[tier], float(held[rank]) / 1e6) for tier, held in used]) for rank in ranks]
    intro = tag("p", text(f"The most that a rank holds in any phase of a run: {fullest_ranks(planned)}."))
    swatches = (tag("span", class_=f"swatch {colours[tier]}") + text(f"{tier} ") for tier, _ in used)
    return intro + tag("p", *swatches) + row_bars("Megabytes by rank and tier", rows, "MB")


def _tables(found: Sequence[Reason]) -> str:
    header = ["table", "scheme", "ranks", "ms of a rank", "bytes", "runner-up", "ms of a step with it"]
    rows = [
        [
            text(" + ".join(one.tables)),
            text(one.scheme),
            text(spans(one.ranks)),
            text(f"{1e3 * one.rank_s:.3g}"),
            text(byte_size(one.num_bytes)),
            text(one.runner_up or "none"),
            text(f"{1e3 * one.runner_up_s:.4g}" if one.runner_up else ""),
        ]
        for one in found
    ]
    return tag("p", text(f"{count(len(found))} in all.")) + table(header, rows, {3, 4, 6})
