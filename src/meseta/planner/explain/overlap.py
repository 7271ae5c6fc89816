"""What of a step's transfers is hidden behind computation, under the plan that was chosen."""

from __future__ import annotations

from meseta.planner.cost.predict import Prediction
from meseta.planner.search.plan_result import PlanResult

OVERLAP_HEADERS = ("transfer", "ms", "ms exposed", "ms hidden")


def overlap_title(planned: PlanResult) -> str:
    """What may be hidden."""
    return f"transfers of a step on the slowest rank; hidden may be: {', '.join(planned.problem.workload.overlap)}"


def overlap_rows(prediction: Prediction) -> list[list[str]]:
    """Cells of a table, by transfer, in milliseconds: how long it is on the link of the rank where it takes longest,
    how long this waits for it, and what is left; none on one rank."""
    found: dict[str, tuple[float, float]] = {}
    for one, link_s, waited_s in zip(prediction.collectives, prediction.link_s, prediction.exposed_s, strict=True):
        slowest = int(link_s.argmax())
        before = found.get(one.name, (0.0, 0.0))
        found[one.name] = before[0] + float(link_s[slowest]), before[1] + float(waited_s[slowest])
    return [
        [name, f"{1e3 * link_s:.3g}", f"{1e3 * waited_s:.3g}", f"{1e3 * max(link_s - waited_s, 0.0):.3g}"]
        for name, (link_s, waited_s) in found.items()
    ]
