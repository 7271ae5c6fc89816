"""Number of bits per row value in checkpoints, and files that set it for each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from meseta.spec.documents import load_document, parse_dataclass, strip_format, write_yaml

BITS_FORMAT = "meseta.bits/1"
RowBits = Literal[8, 4, 3, 2]
"""Number of bits per value of quantized rows."""
BitsSetting = Literal["exact", "auto", 8, 4, 3, 2]
"""Setting of `checkpoint.bits`. `exact` does not quantize, and `auto` depends on the expected number of restores."""
ROW_BIT_WIDTHS: tuple[RowBits, ...] = get_args(RowBits)
"""All numbers of bits in descending order."""
MAX_RESTORES: Mapping[RowBits, int] = {2: 1, 3: 3, 4: 20}
"""Maximum number of restores of a run for each number of bits, in ascending order. 8 bits have no maximum."""


def min_bits_for_restores(restores: int) -> RowBits:
    """Return the smallest number of bits that allows this number of restores."""
    return next((bits for bits, most in MAX_RESTORES.items() if restores <= most), 8)


@dataclass(frozen=True, kw_only=True)
class TableBits:
    """Quantization of one table."""

    bits: Literal["exact", 8, 4, 3, 2]
    """Number of bits per row value."""


@dataclass(frozen=True, kw_only=True)
class BitsFile:
    """File of bits per table, which `meseta checkpoint advise` writes and `checkpoint.tables` reads."""

    tables: Mapping[str, TableBits]
    """Quantization of each table by name."""
    run: str | None = None
    """Run whose checkpoint was measured."""
    split: str | None = None
    """Split on which the checkpoint was measured."""
    restores: int | None = None
    """Number of restores assumed in the prediction."""
    ne_loss: float | None = None
    """Predicted relative increase of the normalized entropy if all tables are quantized."""

    def write(self, path: Path) -> None:
        """Write the file. Raises MesetaError if that fails."""
        write_yaml(path, {"format": BITS_FORMAT, **asdict(self)})

    @staticmethod
    def load(path: str | Path) -> BitsFile:
        """Load a file of bits. Raises MesetaError with the file's name if it is missing or invalid."""

        def parse(document: dict[Any, Any]) -> BitsFile:
            return parse_dataclass("bits", BitsFile, strip_format("bits", document, BITS_FORMAT, required=True))

        return load_document("bits", path, parse)
