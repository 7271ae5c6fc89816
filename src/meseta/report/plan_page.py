"""A plan before its run, as a page: what every rank will do and hold, and why every table lies where it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meseta.machine.files import write_atomic
from meseta.planner import PlanResult
from meseta.planner.explain.codec_predictions import codec_headers, codec_rows, predict_codecs
from meseta.planner.explain.difference import format_ranks
from meseta.planner.explain.memory import describe_fullest_ranks
from meseta.planner.explain.overlap import OVERLAP_HEADERS, overlap_rows, overlap_title
from meseta.planner.explain.table_choices import TableChoice
from meseta.report.charts.chart import horizontal_bars
from meseta.report.charts.markup import escape, table, tag
from meseta.report.charts.plan_treemap import plan_treemap
from meseta.report.document import html_document
from meseta.report.stages import stage_css_class
from meseta.spec.stages import STEP_COMPONENTS, StepComponent, component_stages
from meseta.spec.tiers import DISK, HBM, HOST, MEMORIES, Memory
from meseta.telemetry.formatting import format_bytes, format_count, format_percent, format_quantity, format_si

MAX_DRAWN_RANKS = 64
"""Ranks that are drawn; of more, the fullest and the busiest."""


def write_plan_page(planned: PlanResult, found: Sequence[TableChoice], path: Path, note: str | None = None) -> Path:
    """Write the page, with a `note` about the machines, and return its path. Raises MesetaError where it cannot be
    written."""
    title = (
        f"Plan of {format_quantity(len(planned.plan.tables), 'table')} on "
        f"{format_quantity(planned.plan.num_ranks, 'rank')}"
    )
    ranks = planned.prediction.most_loaded_ranks(MAX_DRAWN_RANKS)
    parts = [
        tag("h1", escape(title)),
        _headline(planned),
        tag("p", escape(note)) if note else "",
        tag("h2", "Time of a step"),
        _legend(),
        _times_chart(planned, ranks),
    ]
    parts += [
        *_transfers_section(planned),
        *_codecs_section(planned),
        tag("h2", "Memory"),
        _memory_section(planned, ranks),
    ]
    if planned.plan.num_ranks <= MAX_DRAWN_RANKS:
        boxes = plan_treemap(planned.plan)
        parts += [tag("h2", "Where the rows lie"), boxes] if boxes else []
    parts += [tag("h2", "Tables"), _tables_section(found)]
    write_atomic(path, html_document(title, *parts))
    return path


def _headline(planned: PlanResult) -> str:
    step_s, bound = planned.prediction.step_s, planned.bound
    samples = planned.problem.workload.batch_size / step_s
    has_networks = planned.problem.cost_model.neural is not None
    alone = ", by the constants alone, without the networks that correct them" if has_networks else ""
    lines = [
        f"A step is predicted to take {1e3 * step_s:.4g} ms, {format_si(samples)} samples/s; rank "
        f"{planned.prediction.bottleneck} has the most lookup and update.",
        f"No plan of these schemes takes less than {1e3 * bound.step_s:.4g} ms ({bound.reason}){alone}; this one is "
        f"{format_percent(bound.relative_gap(planned.constants_step_s))} above that.",
    ]
    return "".join(tag("p", escape(line)) for line in lines)


def _component_css_class(name: StepComponent) -> str:
    """That of the first stage which a predicted part is made of."""
    return stage_css_class((), component_stages(name)[0])


def _legend() -> str:
    return tag(
        "p",
        *(tag("span", class_=f"swatch {_component_css_class(name)}") + escape(f"{name} ") for name in STEP_COMPONENTS),
    )


def _times_chart(planned: PlanResult, ranks: Sequence[int]) -> str:
    seconds = planned.prediction.seconds
    rows = [
        (
            f"rank {rank}",
            [(name, _component_css_class(name), 1e3 * float(seconds[name][rank])) for name in STEP_COMPONENTS],
        )
        for rank in ranks
    ]
    return horizontal_bars("Milliseconds of a step by rank and component", rows, "ms")


def _transfers_section(planned: PlanResult) -> list[str]:
    """A table of what each transfer is waited for; nothing where none is hidden."""
    rows = [[escape(cell) for cell in cells] for cells in overlap_rows(planned.prediction)]
    if not rows or not planned.problem.workload.overlap:
        return []
    intro = tag("p", escape(f"Predicted, {overlap_title(planned)}."))
    return [tag("h2", "Transfers"), intro, table(list(OVERLAP_HEADERS), rows, {1, 2, 3}, "compact")]


def _codecs_section(planned: PlanResult) -> list[str]:
    """A table of what each codec would make of the step; nothing on one rank."""
    found = predict_codecs(planned)
    if not found:
        return []
    heads = codec_headers(found)
    rows = [[escape(cell) for cell in cells] for cells in codec_rows(found)]
    intro = escape("Predicted, all tables where they are; * as chosen.")
    return [tag("h2", "Codecs"), tag("p", intro), table(heads, rows, set(range(1, len(heads))), "compact")]


def _memory_section(planned: PlanResult, ranks: Sequence[int]) -> str:
    tiers = [(tier, planned.prediction.peak_bytes(tier)) for tier in MEMORIES]
    colours: dict[Memory, str] = {HBM: "stage-lookup", HOST: "stage-backward", DISK: "stage-dense_update"}
    used = [(tier, held) for tier, held in tiers if held.any()]
    rows = [(f"rank {rank}", [(tier, colours[tier], float(held[rank]) / 1e6) for tier, held in used]) for rank in ranks]
    intro = tag("p", escape(f"The most that a rank holds in any phase of a run: {describe_fullest_ranks(planned)}."))
    swatches = (tag("span", class_=f"swatch {colours[tier]}") + escape(f"{tier} ") for tier, _ in used)
    return intro + tag("p", *swatches) + horizontal_bars("Megabytes by rank and tier", rows, "MB")


def _tables_section(found: Sequence[TableChoice]) -> str:
    header = ["table", "scheme", "ranks", "ms of a rank", "bytes", "runner-up", "ms of a step with it"]
    rows = [
        [
            escape(" + ".join(one.tables)),
            escape(one.scheme),
            escape(format_ranks(one.ranks)),
            escape(f"{1e3 * one.rank_s:.3g}"),
            escape(format_bytes(one.num_bytes)),
            escape(one.runner_up or "none"),
            escape(f"{1e3 * one.runner_up_s:.4g}" if one.runner_up else ""),
        ]
        for one in found
    ]
    return tag("p", escape(f"{format_count(len(found))} in all.")) + table(header, rows, {3, 4, 6})
