"""Predicted step of a plan with each codec and exchange algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.planning import EXCHANGES
from meseta.planner.search.search import PlanResult
from meseta.spec import Plan
from meseta.spec.codecs import Communication, Direction, ExchangeAlgorithm, Precision


@dataclass(frozen=True, kw_only=True)
class CodecPrediction:
    """Predicted step of a plan with one precision of `comm` and one exchange algorithm."""

    precision: Precision
    exchange: ExchangeAlgorithm | None
    """Exchange algorithm between hosts, or `None` if there is no choice."""
    step_s: float
    """Predicted seconds per step."""
    intra_host_bytes: float
    """Bytes per step that all ranks send inside hosts."""
    inter_host_bytes: float
    """Bytes per step that all ranks send between hosts."""
    is_chosen: bool
    """Whether the workload uses these codecs and the plan uses this algorithm."""


def predict_codecs(planned: PlanResult) -> list[CodecPrediction]:
    """Predict each precision and exchange algorithm. Tables of type float64 allow only fp32. Empty on a single rank."""
    plan, workload, topology = planned.plan, planned.problem.workload, planned.problem.topology
    if plan.num_ranks == 1:
        return []
    has_choice = 1 < topology.devices_per_host < topology.num_ranks
    exchanges: Sequence[ExchangeAlgorithm | None] = EXCHANGES if has_choice else (None,)
    is_wide = any(table.dtype == "float64" for table in workload.tables)
    chosen = {precision: Communication(precision=precision) for precision in get_args(Precision)}
    return [
        _predict_codec(planned, precision, comm, exchange)
        for precision, comm in chosen.items()
        if comm.is_lossless or not is_wide
        for exchange in exchanges
    ]


def _predict_codec(
    planned: PlanResult, precision: Precision, comm: Communication, exchange: ExchangeAlgorithm | None
) -> CodecPrediction:
    problem = planned.problem
    plan, workload = _with_exchange(planned.plan, comm, exchange), replace(problem.workload, comm=comm)
    prediction = predict(plan, workload, problem.topology, problem.cost_model, loads=problem.loads, run=problem.run)
    asked = problem.workload.comm
    is_chosen = all(asked.codec(one) == comm.codec(one) for one in get_args(Direction))
    return CodecPrediction(
        precision=precision,
        exchange=exchange,
        step_s=prediction.step_s,
        intra_host_bytes=float(sum(one.sent_intra_host.sum() for one in prediction.collectives)),
        inter_host_bytes=float(sum(one.sent_inter_host.sum() for one in prediction.collectives)),
        is_chosen=is_chosen and exchange == planned.plan.exchange,
    )


def _with_exchange(plan: Plan, comm: Communication, exchange: ExchangeAlgorithm | None) -> Plan:
    path = plan.dense_exchange or "cross_host" if exchange == "hierarchical" else None
    # A chain of hosts cannot be used with a codec.
    if path == "chain" and not comm.is_lossless:
        path = "cross_host"
    return replace(plan, exchange=exchange, dense_exchange=path)


def codec_rows(predictions: Sequence[CodecPrediction]) -> list[list[str]]:
    """Return table rows for reports: codec, milliseconds per algorithm, and megabytes between hosts per algorithm."""
    rows: dict[str, list[CodecPrediction]] = {}
    for one in predictions:
        rows.setdefault(one.precision, []).append(one)
    return [
        [
            precision,
            *(f"{1e3 * one.step_s:.4g}" + " *" * one.is_chosen for one in ways),
            *(f"{(one.inter_host_bytes or one.intra_host_bytes) / 1e6:,.3g}" for one in ways),
        ]
        for precision, ways in rows.items()
    ]


def codec_headers(predictions: Sequence[CodecPrediction]) -> list[str]:
    """Return the column headers of `codec_rows`."""
    ways = list(dict.fromkeys(one.exchange for one in predictions))
    sent = "MB across" if any(one.inter_host_bytes for one in predictions) else "MB sent"
    names = [f" {way}" if way else "" for way in ways]
    return ["codec", *(f"ms a step{name}" for name in names), *(f"{sent}{name}" for name in names)]


OVERLAP_HEADERS = ("transfer", "ms", "ms exposed", "ms hidden")


def overlap_title(planned: PlanResult) -> str:
    """Return the title of the table, with the transfers that may overlap."""
    return (
        f"transfers of a step on the slowest rank; overlap enabled for: {', '.join(planned.problem.workload.overlap)}"
    )


def overlap_rows(prediction: Prediction) -> list[list[str]]:
    """Return table rows for reports: transfer, and its milliseconds on the slowest link, exposed and hidden. Empty on a
    single rank."""
    totals: dict[str, tuple[float, float]] = {}
    for one, link_s, waited_s in zip(prediction.collectives, prediction.link_s, prediction.exposed_s, strict=True):
        slowest = int(link_s.argmax())
        before = totals.get(one.name, (0.0, 0.0))
        totals[one.name] = before[0] + float(link_s[slowest]), before[1] + float(waited_s[slowest])
    return [
        [name, f"{1e3 * link_s:.3g}", f"{1e3 * waited_s:.3g}", f"{1e3 * max(link_s - waited_s, 0.0):.3g}"]
        for name, (link_s, waited_s) in totals.items()
    ]
