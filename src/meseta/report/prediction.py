"""What the cost model predicted of a step, beside what the run measured. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.spec.stages import STEP_COMPONENTS, StepComponent, component_stages
from meseta.telemetry.summary import RunSummary
from meseta.telemetry.transfers import TransferMeans

MAX_RANKS = 8
"""Ranks that the page shows; of more, the mean."""


@dataclass(frozen=True, kw_only=True)
class ComparedComponent:
    """One component on one rank, in seconds per step."""

    component: StepComponent
    rank: int
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None


def compare_components(summary: RunSummary | None) -> list[ComparedComponent]:
    """By component, then by rank; empty for a run that has not ended, or whose summary lacks either."""
    if summary is None or summary.predicted is None or not summary.stages_s_by_rank:
        return []
    return [
        ComparedComponent(
            component=component,
            rank=rank,
            predicted_s=summary.predicted.seconds.get(component, [0.0] * (rank + 1))[rank],
            measured_s=sum(stages.get(name, 0.0) for name in component_stages(component)),
        )
        for component in STEP_COMPONENTS
        for rank, stages in enumerate(summary.stages_s_by_rank)
        if rank < len(summary.predicted.seconds.get(component, summary.stages_s_by_rank))
    ]


@dataclass(frozen=True, kw_only=True)
class ComparedTransfer:
    """One transfer of a step, in the mean over ranks."""

    name: str
    predicted: TransferMeans
    measured: TransferMeans


def compare_transfers(summary: RunSummary | None) -> list[ComparedTransfer]:
    """By the name of the transfer, in the order of a step; what only one of both has is 0 in the other. Empty where the
    summary lacks either."""
    if summary is None or summary.predicted is None:
        return []
    predicted, measured = summary.predicted.transfers_by_rank, summary.transfers_by_rank
    if not any(predicted) or not any(measured):
        return []
    names = dict.fromkeys(name for means in (*predicted, *measured) for name in means)
    return [
        ComparedTransfer(
            name=name, predicted=_mean_over_ranks(predicted, name), measured=_mean_over_ranks(measured, name)
        )
        for name in names
    ]


def _mean_over_ranks(ranks: Sequence[Mapping[str, TransferMeans]], name: str) -> TransferMeans:
    nothing = TransferMeans(0.0, 0.0, 0.0, 0.0, 0.0)
    return sum((means.get(name, nothing) for means in ranks), nothing) / len(ranks)


def compare_cache_misses(record: RunRecord) -> dict[str, tuple[float, float]]:
    """Of each table whose rows lie far: rows that a step brings over all ranks, as predicted, and as counted since the
    last line but one, when caches are as full as they get. Empty where either is missing."""
    predicted = None if record.summary is None else record.summary.predicted
    counted = next((line.row_traffic for line in reversed(record.train_lines) if line.row_traffic), {})
    if predicted is None:
        return {}
    return {name: (misses, counted[name].num_misses) for name, misses in predicted.misses.items() if name in counted}


def predicted_section(record: RunRecord) -> str:
    """A table of both; an empty string where there is nothing to compare."""
    found = compare_components(record.summary)
    if not found or record.summary is None or record.summary.predicted is None:
        return ""
    num_ranks = 1 + max(own.rank for own in found)
    shown = list(range(num_ranks)) if num_ranks <= MAX_RANKS else []
    heads = ["component", *(f"on rank {rank}" for rank in shown), *([] if shown else [f"mean of {num_ranks} ranks"])]
    rows = []
    for component in STEP_COMPONENTS:
        own = [one for one in found if one.component == component]
        mean = sum(one.predicted_s for one in own) / num_ranks, sum(one.measured_s for one in own) / num_ranks
        cells = [_cell(one.predicted_s, one.measured_s) for one in own] if shown else [_cell(*mean)]
        rows.append([escape(component), *cells])
    intro = (
        f"Milliseconds per step, predicted and measured; constants {record.summary.predicted.constants}. Exchanges are "
        "measured with the waiting for the slowest rank; dense holds the sum of gradients over ranks."
    )
    if hidden := record.summary.predicted.overlap:
        intro += f" Both are of a step that hides {', '.join(hidden)}: exchanges count for what is waited for."
    components = table(heads, rows, set(range(1, len(heads))), "compact")
    return tag("p", escape(intro)) + components + _wait_table(record.summary)


def _wait_table(summary: RunSummary) -> str:
    """What ranks stand still for, predicted and measured; an empty string where either says nothing."""
    found = compare_transfers(summary)
    if not found or summary.predicted is None or summary.predicted.overlap is None:
        return ""
    rows = [[escape(one.name), _cell(one.predicted.wait_s, one.measured.wait_s)] for one in found]
    return table(["transfer", "ms waited for, mean over ranks"], rows, {1}, "compact")


def _cell(predicted_s: float, measured_s: float) -> str:
    return escape(f"{1e3 * predicted_s:.2f} / {1e3 * measured_s:.2f}")
