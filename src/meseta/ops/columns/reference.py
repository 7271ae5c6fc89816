"""Columns moved in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def place_columns(out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], scale: float) -> None:
    """See meseta.ops.columns; `moves` has the five fields of each."""
    for source, start, to, width, add in zip(*(moves[field::5] for field in range(5)), strict=True):
        columns, place = sources[source][:, start : start + width] * scale, out[:, to : to + width]
        if add:
            place += columns
        else:
            place.copy_(columns)
