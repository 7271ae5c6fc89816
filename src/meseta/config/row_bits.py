"""Bits that a checkpoint keeps of each value of a table's rows, and files that say how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from meseta.spec.documents import load_document, parse_dataclass, strip_format, write_yaml

BITS_FORMAT = "meseta.bits/1"
RowBits = Literal[8, 4, 3, 2]
"""Widths of the codes of quantised rows."""
BitsSetting = Literal["exact", "auto", 8, 4, 3, 2]
"""What a config asks for."""
ROW_BIT_WIDTHS: tuple[RowBits, ...] = get_args(RowBits)
"""From the widest down."""
MAX_RESTORES: Mapping[RowBits, int] = {2: 1, 3: 3, 4: 20}
"""Restores that a run of each width may see, from the narrowest up; 8 bits stand any number."""


def min_bits_for_restores(restores: int) -> RowBits:
    """The fewest bits that stand so many restores."""
    return next((bits for bits, most in MAX_RESTORES.items() if restores <= most), 8)


@dataclass(frozen=True, kw_only=True)
class TableBits:
    """Of one table."""

    bits: Literal["exact", 8, 4, 3, 2]
    """Of each value of its rows, for example 4."""


@dataclass(frozen=True, kw_only=True)
class BitsFile:
    """What `meseta checkpoint advise` writes, and `checkpoint.tables` takes."""

    tables: Mapping[str, TableBits]
    """By name."""
    run: str | None = None
    """Whose checkpoint was measured."""
    split: str | None = None
    """Of its data, on which."""
    restores: int | None = None
    """How many the forecast is for."""
    ne_loss: float | None = None
    """By what part the normalised entropy rises, all tables together."""

    def write(self, path: Path) -> None:
        """Raises MesetaError where it cannot be written."""
        write_yaml(path, {"format": BITS_FORMAT, **asdict(self)})

    @staticmethod
    def load(path: str | Path) -> BitsFile:
        """Raises MesetaError, naming the file, for one that is none."""

        def parse(document: dict[Any, Any]) -> BitsFile:
            return parse_dataclass("bits", BitsFile, strip_format("bits", document, BITS_FORMAT, required=True))

        return load_document("bits", path, parse)
