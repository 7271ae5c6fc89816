"""Outcomes of many tasks: as lines of a file that a later run goes on from, and as figures."""

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
    """All planners on one task."""

    seed: int
    """The task is `random_task(seed)`."""
    judged_by: str
    """Digest of the cost model; outcomes of different ones are not mixed."""
    costs: Mapping[str, Cost]
    """By planner."""
    failures: Mapping[str, str]
    """By planner: why it has no plan, or none that fits."""

    def has(self, planners: Iterable[str]) -> bool:
        """Whether all of them were asked."""
        return all(name in self.costs or name in self.failures for name in planners)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> BalanceOutcome:
        """The inverse of `to_json`; raises ValueError, KeyError or TypeError for anything else."""
        document = json.loads(line)
        costs = {name: _cost(own) for name, own in document["costs"].items()}
        return BalanceOutcome(**{**document, "costs": costs})


def _cost(document: dict[str, Any]) -> Cost:
    fields: dict[str, Any] = {key: tuple(own) if isinstance(own, list) else own for key, own in document.items()}
    return Cost(**fields)


def read_outcomes(path: Path, judged_by: str) -> list[BalanceOutcome]:
    """What a file holds; nothing where there is none. A last line that an interruption cut off is dropped from it.

    Raises MesetaError for a file of something else, and for outcomes judged by another cost model."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines = lines[:-1]
        path.write_text("".join(lines))
    found = []
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
        found.append(outcome)
    return found


@dataclass(frozen=True, kw_only=True)
class Versus:
    """One planner beside another, over the tasks in which both have a plan that fits."""

    num_tasks: int
    """Of these."""
    mean: float
    """Mean of our cost over the other's: below 1 where ours is better."""
    worst: float
    """The largest."""
    wins: float
    """Share of tasks in which ours costs less."""


def ratios_to(outcomes: Sequence[BalanceOutcome], ours: str, others: Sequence[str]) -> list[float]:
    """Cost of `ours` over that of the best of `others`, of every task in which it and one of them has a plan."""
    found = []
    for outcome in outcomes:
        known = [outcome.costs[name].step_s for name in others if name in outcome.costs]
        if known and ours in outcome.costs:
            found.append(outcome.costs[ours].step_s / min(known))
    return found


def versus(ratios: Sequence[float]) -> Versus:
    """Figures of ratios; there is one at least."""
    values = np.array(ratios)
    return Versus(
        num_tasks=len(values),
        mean=float(values.mean()),
        worst=float(values.max()),
        wins=float((values < 1.0).mean()),
    )


def success(outcomes: Sequence[BalanceOutcome], planners: Sequence[str]) -> float:
    """Share of tasks in which one of the planners has a plan that fits."""
    return sum(any(name in own.costs for name in planners) for own in outcomes) / max(len(outcomes), 1)
