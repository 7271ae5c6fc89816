"""Comparison of predicted and measured step times. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.spec.stages import STEP_COMPONENTS, StepComponent, component_stages
from meseta.telemetry.span import TransferMeans
from meseta.telemetry.summary import RunSummary

MAX_RANKS = 8
"""Maximum number of ranks with a column each. For more ranks, the page shows one column of means."""


@dataclass(frozen=True, kw_only=True)
class ComparedComponent:
    """Predicted and measured time of one component of a step on one rank."""

    component: StepComponent
    rank: int
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured time divided by the predicted time. `None` if the predicted time is zero."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None


def compare_components(summary: RunSummary | None) -> list[ComparedComponent]:
    """Return the components of all ranks, sorted by component and rank. Empty if the run has not ended, or lacks
    prediction or measurement."""
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
    """Predicted and measured values of one transfer per step, as means over ranks."""

    name: str
    predicted: TransferMeans
    measured: TransferMeans


def compare_transfers(summary: RunSummary | None) -> list[ComparedTransfer]:
    """Return all predicted or measured transfers, in the order of a step.

    A transfer that was only predicted, or only measured, has zeros for the other. Empty if the summary lacks predicted
    or measured transfers.
    """
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
    """Return (predicted, counted) cache misses per step and offloaded table. Tables without either are left out."""
    predicted = None if record.summary is None else record.summary.predicted
    # The last line covers the newest steps, for which the caches are as full as they will be.
    counted = next((line.row_traffic for line in reversed(record.train_lines) if line.row_traffic), {})
    if predicted is None:
        return {}
    return {name: (misses, counted[name].num_misses) for name, misses in predicted.misses.items() if name in counted}


def predicted_section(record: RunRecord) -> str:
    """Return tables of predicted and measured times, or an empty string if there is nothing to compare."""
    compared = compare_components(record.summary)
    if not compared or record.summary is None or record.summary.predicted is None:
        return ""
    num_ranks = 1 + max(one.rank for one in compared)
    shown = list(range(num_ranks)) if num_ranks <= MAX_RANKS else []
    heads = ["component", *(f"on rank {rank}" for rank in shown), *([] if shown else [f"mean of {num_ranks} ranks"])]
    rows = []
    for component in STEP_COMPONENTS:
        by_rank = [one for one in compared if one.component == component]
        mean = sum(one.predicted_s for one in by_rank) / num_ranks, sum(one.measured_s for one in by_rank) / num_ranks
        cells = [_cell(one.predicted_s, one.measured_s) for one in by_rank] if shown else [_cell(*mean)]
        rows.append([escape(component), *cells])
    intro = (
        f"Milliseconds per step, predicted / measured, with the constants {record.summary.predicted.constants}. "
        "Measured exchanges include the wait for the slowest rank. Dense includes the sum of gradients over ranks."
    )
    if hidden := record.summary.predicted.overlap:
        intro += f" The step overlaps {', '.join(hidden)} with computation. Exchanges count as their exposed time only."
    components = table(heads, rows, set(range(1, len(heads))), "compact")
    return tag("p", escape(intro)) + components + _wait_table(record.summary)


def _wait_table(summary: RunSummary) -> str:
    compared = compare_transfers(summary)
    # Summaries of older versions have no overlap, and predict no waits.
    if not compared or summary.predicted is None or summary.predicted.overlap is None:
        return ""
    rows = [[escape(one.name), _cell(one.predicted.wait_s, one.measured.wait_s)] for one in compared]
    return table(["transfer", "ms exposed, mean over ranks"], rows, {1}, "compact")


def _cell(predicted_s: float, measured_s: float) -> str:
    return escape(f"{1e3 * predicted_s:.2f} / {1e3 * measured_s:.2f}")
