"""Where a reader stands."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Where a reader stands: before this row, in the order of this epoch."""

    epoch: int
    """From 0."""
    row: int
    """From 0; 0 where the epoch begins."""
