"""HTML page about a plan: predicted time and memory of each rank, and the choice made for each table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meseta.planner import PlanResult
from meseta.planner.explain.communication import (
    OVERLAP_HEADERS,
    codec_headers,
    codec_rows,
    overlap_rows,
    overlap_title,
    predict_codecs,
)
from meseta.planner.explain.memory import describe_fullest_ranks
from meseta.planner.explain.tables import TableChoice, format_ranks
from meseta.report.charts.chart import horizontal_bars
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.report.charts.plan_treemap import plan_treemap
from meseta.report.step_tables import stage_css_class
from meseta.spec.stages import STEP_COMPONENTS, StepComponent, component_stages
from meseta.spec.tiers import DISK, HBM, HOST, MEMORIES, Memory
from meseta.system.files import write_atomic
from meseta.telemetry.formatting import format_bytes, format_count, format_percent, format_quantity, format_si

MAX_DRAWN_RANKS = 64
"""Maximum number of ranks in charts. For larger plans the most loaded ranks are shown."""


def write_plan_page(planned: PlanResult, found: Sequence[TableChoice], path: Path, note: str | None = None) -> Path:
    """Write the page about a plan and return its path.

    Args:
        planned: The plan with its prediction.
        found: Placement of each table with its best alternative.
        path: Path of the page.
        note: Remark about the machines, shown below the headline.

    Raises:
        MesetaError: The page cannot be written.
    """
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
    # The treemap has a column for each rank, which is too wide for large plans.
    if planned.plan.num_ranks <= MAX_DRAWN_RANKS:
        boxes = plan_treemap(planned.plan)
        parts += [tag("h2", "Placement of rows"), boxes] if boxes else []
    parts += [tag("h2", "Tables"), _tables_section(found)]
    write_atomic(path, html_document(title, *parts))
    return path


def _headline(planned: PlanResult) -> str:
    step_s, bound = planned.prediction.step_s, planned.bound
    samples = planned.problem.workload.batch_size / step_s
    has_networks = planned.problem.cost_model.neural is not None
    # The lower bound holds for the constants of the cost model, not for the corrections by its networks.
    alone = ", predicted from the constants of the cost model without its networks" if has_networks else ""
    lines = [
        f"A step is predicted to take {1e3 * step_s:.4g} ms ({format_si(samples)} samples/s). Rank "
        f"{planned.prediction.bottleneck} has the longest time for lookup and update.",
        f"No plan with these sharding types takes less than {1e3 * bound.step_s:.4g} ms ({bound.reason}){alone}; this "
        f"plan takes {format_percent(bound.relative_gap(planned.constants_step_s))} more.",
    ]
    return "".join(tag("p", escape(line)) for line in lines)


def _component_css_class(name: StepComponent) -> str:
    # A predicted component may cover several measured stages, and takes the color of the first one.
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
    rows = [[escape(cell) for cell in cells] for cells in overlap_rows(planned.prediction)]
    # The table compares exposed and hidden times. Without overlap nothing is hidden.
    if not rows or not planned.problem.workload.overlap:
        return []
    intro = tag("p", escape(f"Predicted, {overlap_title(planned)}."))
    return [tag("h2", "Transfers"), intro, table(list(OVERLAP_HEADERS), rows, {1, 2, 3}, "compact")]


def _codecs_section(planned: PlanResult) -> list[str]:
    predictions = predict_codecs(planned)
    # A single rank has no exchanges, and therefore no predictions for codecs.
    if not predictions:
        return []
    heads = codec_headers(predictions)
    rows = [[escape(cell) for cell in cells] for cells in codec_rows(predictions)]
    intro = escape("Predicted for each codec, with the placement of this plan. An asterisk marks the chosen codecs.")
    return [tag("h2", "Codecs"), tag("p", intro), table(heads, rows, set(range(1, len(heads))), "compact")]


def _memory_section(planned: PlanResult, ranks: Sequence[int]) -> str:
    tiers = [(tier, planned.prediction.peak_bytes(tier)) for tier in MEMORIES]
    colours: dict[Memory, str] = {HBM: "stage-lookup", HOST: "stage-backward", DISK: "stage-dense_update"}
    used = [(tier, held) for tier, held in tiers if held.any()]
    rows = [(f"rank {rank}", [(tier, colours[tier], float(held[rank]) / 1e6) for tier, held in used]) for rank in ranks]
    intro = tag(
        "p", escape(f"Peak memory of the fullest rank over all phases of a run: {describe_fullest_ranks(planned)}.")
    )
    swatches = (tag("span", class_=f"swatch {colours[tier]}") + escape(f"{tier} ") for tier, _ in used)
    return intro + tag("p", *swatches) + horizontal_bars("Megabytes by rank and tier", rows, "MB")


def _tables_section(choices: Sequence[TableChoice]) -> str:
    header = ["table", "scheme", "ranks", "ms per rank", "bytes", "runner-up", "ms per step with runner-up"]
    rows = [
        [
            escape(" + ".join(choice.tables)),
            escape(choice.scheme),
            escape(format_ranks(choice.ranks)),
            escape(f"{1e3 * choice.rank_s:.3g}"),
            escape(format_bytes(choice.num_bytes)),
            escape(choice.runner_up or "none"),
            escape(f"{1e3 * choice.runner_up_s:.4g}" if choice.runner_up else ""),
        ]
        for choice in choices
    ]
    return tag("p", escape(f"{format_count(len(choices))} placements in total.")) + table(header, rows, {3, 4, 6})
