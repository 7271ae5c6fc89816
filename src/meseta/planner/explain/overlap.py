"""Exposed and hidden time of the transfers of a plan."""

from __future__ import annotations

from meseta.planner.cost.predict import Prediction
from meseta.planner.search.plan_result import PlanResult

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
