"""Averages of weights in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint.files.block import Values
from meseta.optim.row.average import ERA, LAG, average_rows
from meseta.spec.average import MAX_GATHERED_ROWS, AverageSpec
from meseta.storage import ROW, TableStorage, as_stored

AVERAGE_KEY, STEP_KEY = "average", "embedding_step"
"""Keys of a checkpoint's state."""
AVERAGE_PREFIX, MODEL_PREFIX = "average.", "model."
"""Beginnings of names of dense tensors."""


def saved_average(state: Mapping[str, Any]) -> AverageSpec | None:
    """Return the average of a checkpoint. Raises MesetaError if it is invalid."""
    entry = state.get(AVERAGE_KEY)
    return None if entry is None else AverageSpec(**entry)


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
    for shard in () if average is None else shards:
        for first in range(0, shard.shard.num_rows if LAG in shard.values else 0, MAX_GATHERED_ROWS):
            values = shard.read(first, min(first + MAX_GATHERED_ROWS, shard.shard.num_rows))
            assert average is not None
            rows = average_rows(average, state[STEP_KEY], values[ROW], values)
            written = {ROW: rows, LAG: torch.zeros_like(values[LAG])}
            shard.write(first, {name: as_stored(value).cpu().numpy() for name, value in written.items()})
