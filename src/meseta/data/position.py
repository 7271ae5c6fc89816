"""Position of a reader in the data."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Position of a reader: the next row in the order of an epoch."""

    epoch: int
    """Number of the epoch, from 0."""
    row: int
    """Number of the row in the epoch, from 0."""
