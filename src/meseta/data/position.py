"""Position of a reader."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Position of a reader: the epoch, and the row in the order of that epoch that is read next."""

    epoch: int
    """Index of the epoch, from 0."""
    row: int
    """Index of the next row in the order of the epoch, from 0."""
