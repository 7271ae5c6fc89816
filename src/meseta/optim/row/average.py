"""Average of rows over steps, kept by their row optimizer. `meseta.spec.average` has the formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meseta.ops.row_program.optimizer import (
    Hyper,
    RowOptimizer,
    RowState,
    RowStats,
    Value,
    Values,
    element_state,
    row_state,
    where,
)
from meseta.ops.row_program.symbols import ScalarSymbol
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError
from meseta.spec.average import ERA_BITS, AverageSpec

LAG, ERA = "average_lag", "average_era"
"""Names of the states of an average."""


def keep_average(optimizer: RowOptimizer, average: AverageSpec) -> RowOptimizer:
    """Add the states of an average, which do not change the updates. Raises MesetaError if a state has their name."""

    def init(weight: Tensor) -> RowState:
        states = optimizer.init(weight)
        if LAG in states or ERA in states:
            raise MesetaError(f"row optimizer {optimizer.name!r}: state names {LAG} and {ERA} are reserved; rename it")
        eras = {ERA: row_state(weight)} if average.has_eras else {}
        return {**states, LAG: element_state(weight), **eras}

    def without_average(stage: RowStats) -> RowStats:
        return lambda w, g, state, stats, h: stage(w, g, _drop_average(state), stats, h)

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        rows, states = optimizer.update(w, g, _drop_average(state), stats, h)
        lag, eras = state[LAG], {}
        if average.has_eras:
            eras[ERA] = _map_number(average.era, h.step)
            behind = eras[ERA] - state[ERA]
            # Powers of two are exact.
            lag = where(behind > 0.5, where(behind > 1.5, 0.0, lag * 2.0**-ERA_BITS), lag)
        return rows, {**states, LAG: lag + (rows - w) * _map_number(average.scale, h.step), **eras}

    return replace(optimizer, init=init, row_stats=tuple(map(without_average, optimizer.row_stats)), update=update)


def _drop_average(state: Values) -> Values:
    return {name: value for name, value in state.items() if name not in (LAG, ERA)}


def _map_number(function: Callable[[int], float], number: Any) -> Any:
    return number.map(function) if isinstance(number, ScalarSymbol) else function(number)


def average_rows(
    average: AverageSpec, step: int, rows: Float[Tensor, "n D"], state: Mapping[str, Tensor]
) -> Float[Tensor, "n D"]:
    """Return the averages of rows after `step` steps, given their states. Without a lag they are the rows."""
    if LAG not in state:
        return rows
    factors = average.factors(step)
    if not average.has_eras:
        return rows - state[LAG] * factors[0]
    behind = (average.era(step) - state[ERA]).clamp(0, 2).to(torch.int64)
    return rows - state[LAG] * rows.new_tensor([*factors, 0.0])[behind].unsqueeze(1)
