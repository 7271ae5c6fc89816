"""Bits that a checkpoint keeps of each value of a table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

RowBits = Literal[8, 4, 3, 2]
"""Widths of the codes of quantised rows."""
WIDTHS: tuple[RowBits, ...] = get_args(RowBits)
"""From the widest down."""
MOST_RESTORES: Mapping[RowBits, int] = {2: 1, 3: 3, 4: 20}
"""Restores that a run of each width may see, from the narrowest up; 8 bits stand any number."""


def bits_for(restores: int) -> RowBits:
    """The fewest bits that stand so many restores."""
    return next((bits for bits, most in MOST_RESTORES.items() if restores <= most), 8)
