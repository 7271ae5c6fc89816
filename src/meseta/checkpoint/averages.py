"""Averages of weights in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint.files.block import Values
from meseta.errors import format_value, is_int
from meseta.optim.row.average import ERA, LAG, average_rows
from meseta.spec import MesetaError
from meseta.spec.average import MAX_GATHERED_ROWS, AverageSpec
from meseta.storage import ROW, TableStorage, as_stored

AVERAGE_KEY, STEP_KEY = "average", "embedding_step"
"""Keys of a checkpoint's state."""
AVERAGE_PREFIX, MODEL_PREFIX = "average.", "model."
"""Beginnings of names of dense tensors."""


def saved_average(state: Mapping[str, Any]) -> AverageSpec | None:
    """Return the average of a checkpoint. Raises MesetaError if it is invalid."""
    entry = state.get(AVERAGE_KEY)
    if entry is None:
        return None
    average = None
    with suppress(TypeError):  # It is no mapping, or has other keys.
        average = AverageSpec(**entry)
    if average is None or not is_int(state.get(STEP_KEY)) or state[STEP_KEY] < 0:
        raise MesetaError(
            f"checkpoint: state {AVERAGE_KEY!r} is {format_value(entry)} at step {format_value(state.get(STEP_KEY))}, "
            "which is not an average; use a checkpoint of `meseta train`"
        )
    return average


def select_averages(dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return dense tensors with averages in place of those of the model."""
    averages = {name.removeprefix(AVERAGE_PREFIX): dense[name] for name in dense if name.startswith(AVERAGE_PREFIX)}
    return {
        name: averages.get(name.removeprefix(MODEL_PREFIX), tensor) if name.startswith(MODEL_PREFIX) else tensor
        for name, tensor in dense.items()
        if not name.startswith(AVERAGE_PREFIX)
    }


def average_values(state: Mapping[str, Any], values: Values) -> np.ndarray:
    """Return averages [n, D] of the rows in `values`."""
    average = saved_average(state)
    if average is None or LAG not in values:
        return values[ROW]
    tensors = {name: torch.from_numpy(values[name].copy()) for name in (ROW, LAG, ERA) if name in values}
    return average_rows(average, state[STEP_KEY], tensors.pop(ROW), tensors).numpy()


def replace_rows_by_averages(shards: Iterable[TableStorage], state: Mapping[str, Any]) -> None:
    """Write averages in place of rows that were loaded from a checkpoint."""
    average = saved_average(state)
    if average is None or average.num_averaged(state[STEP_KEY]) < 2:  # The average is the rows.
        return
    for shard in (shard for shard in shards if LAG in shard.values):
        for first in range(0, shard.shard.num_rows, MAX_GATHERED_ROWS):
            values = shard.read(first, min(first + MAX_GATHERED_ROWS, shard.shard.num_rows))
            rows = average_rows(average, state[STEP_KEY], values[ROW], values)
            written = {ROW: rows, LAG: torch.zeros_like(values[LAG])}
            shard.write(first, {name: as_stored(value).cpu().numpy() for name, value in written.items()})
