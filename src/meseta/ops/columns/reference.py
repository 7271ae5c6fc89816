"""Reference of `place_columns` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def place_columns(out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], scale: float) -> None:
    """Implement `meseta.ops.columns.place_columns` in plain PyTorch."""
    # Moves are stored as five consecutive numbers each.
    for source, start, to, width, add in zip(*(moves[field::5] for field in range(5)), strict=True):
        columns, place = sources[source][:, start : start + width] * scale, out[:, to : to + width]
        if add:
            place += columns
        else:
            place.copy_(columns)
