"""Results of planners for each task, stored as lines of JSON, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from balance.shares import Cost

from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class BalanceOutcome:
    seed: int
    judged_by: str
    """Digest of the cost model. Outcomes of different cost models are not mixed."""
    costs: Mapping[str, Cost]
    failures: Mapping[str, str]
    """Reason by planner without a plan that fits."""

    def has(self, planners: Iterable[str]) -> bool:
        return all(name in self.costs or name in self.failures for name in planners)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> BalanceOutcome:
        """Parse a line of `to_json`. Raises ValueError, KeyError or TypeError if it is invalid."""
        document = json.loads(line)
        costs = {name: _cost(value) for name, value in document["costs"].items()}
        return BalanceOutcome(**{**document, "costs": costs})


def _cost(document: dict[str, Any]) -> Cost:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
    }
    return Cost(**fields)


def read_outcomes(path: Path, judged_by: str) -> list[BalanceOutcome]:
    """Read all outcomes of a file, which may be missing. A truncated last line is removed from it."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines = lines[:-1]
        path.write_text("".join(lines))
    outcomes = []
    for number, line in enumerate(lines, 1):
        try:
            outcome = BalanceOutcome.from_json(line)
        except (ValueError, KeyError, TypeError) as error:
            raise MesetaError(f"{path}, line {number} is no outcome of a task ({error}); name another file") from None
        if outcome.judged_by != judged_by:
            raise MesetaError(
                f"{path} was judged by cost model {outcome.judged_by}, but this run has {judged_by}; give that "
                "model, or another file"
            )
        outcomes.append(outcome)
    return outcomes


@dataclass(frozen=True, kw_only=True)
class Versus:
    """Comparison of two planners over the tasks in which both have a plan that fits."""

    num_tasks: int
    mean: float
    """Mean of our cost relative to the other planner. Below 1 if ours is better."""
    worst: float
    wins: float
    """Share of tasks in which ours costs less."""


def ratios_to(outcomes: Sequence[BalanceOutcome], ours: str, others: Sequence[str]) -> list[float]:
    """Return our cost relative to the best of `others`, for each task in which both have a plan."""
    ratios = []
    for outcome in outcomes:
        known = [outcome.costs[name].step_s for name in others if name in outcome.costs]
        if known and ours in outcome.costs:
            ratios.append(outcome.costs[ours].step_s / min(known))
    return ratios


def versus(ratios: Sequence[float]) -> Versus:
    values = np.array(ratios)
    return Versus(
        num_tasks=len(values), mean=float(values.mean()), worst=float(values.max()), wins=float((values < 1.0).mean())
    )


def success(outcomes: Sequence[BalanceOutcome], planners: Sequence[str]) -> float:
    """Return the share of tasks in which one of the planners has a plan that fits."""
    return sum(any(name in outcome.costs for name in planners) for outcome in outcomes) / max(len(outcomes), 1)
