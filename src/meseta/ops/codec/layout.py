"""What the operators of this folder pass through torch as integers, and where the parts of an encoded row lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meseta.spec import COLUMN_BLOCK, MesetaError
from meseta.spec.codecs import CODECS, Codec

CODEC_LIST = tuple(CODECS.values())
MAX_EXPONENT = 126
"""So that the power of two and its inverse are normal numbers."""
INT64_SIGN_BIT = 1 << 63


class ScaleBlock(NamedTuple):
    """COLUMN_BLOCK columns of a row, or fewer at the end of a piece, that share a scale."""

    piece: int
    first_column: int
    """Column of the row."""
    width: int
    piece_column: int
    """Column of the piece."""


@dataclass(frozen=True)
class RowLayout:
    """Columns of several pieces, as a codec writes them."""

    codec: Codec
    pieces: tuple[int, ...]

    @property
    def num_columns(self) -> int:
        """Of all pieces."""
        return sum(self.pieces)

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return self.codec.row_bytes(self.pieces)

    @property
    def scales_offset(self) -> int:
        """The byte where the scales begin; there are none in 16 bits."""
        return self.num_columns * self.codec.element_bytes + self.num_columns * self.codec.element_bytes % 2

    def blocks(self) -> tuple[ScaleBlock, ...]:
        """In their order in a row, which is that of their scales."""
        return _blocks(self.pieces)


@lru_cache(maxsize=256)
def _blocks(pieces: tuple[int, ...]) -> tuple[ScaleBlock, ...]:
    firsts = accumulate(pieces, initial=0)
    return tuple(
        ScaleBlock(piece, first + inside, min(COLUMN_BLOCK, width - inside), inside)
        for piece, (first, width) in enumerate(zip(firsts, pieces, strict=False))
        for inside in range(0, width, COLUMN_BLOCK)
    )


class CodecLayouts(NamedTuple):
    """Of one encoded matrix, or of several."""

    exponent: int
    rows: tuple[RowLayout, ...]


def pack_layouts(codec: Codec, exponent: int, pieces: Sequence[Sequence[int]]) -> list[int]:
    """Layouts as integers: codec, exponent, then for each matrix how many pieces it has, and their widths."""
    each = [number for widths in pieces for number in (len(widths), *widths)]
    return [CODEC_LIST.index(codec) if codec in CODEC_LIST else -1, exponent, *each]


def unpack_layouts(operator: str, numbers: Sequence[int]) -> CodecLayouts:
    """The way back. Raises MesetaError for a codec that is none, an exponent out of range, and negative widths."""
    if len(numbers) < 2 or not 0 <= numbers[0] < len(CODEC_LIST):
        raise MesetaError(f"{operator}: the codec is none of meseta.spec.codecs; give one of {', '.join(CODECS)}")
    codec, exponent, rest = CODEC_LIST[numbers[0]], numbers[1], list(numbers[2:])
    if codec.is_lossless:
        raise MesetaError(
            f"{operator}: {codec.name} numbers travel as they are; call meseta.ops.columns.place_columns, or take "
            "another codec"
        )
    if abs(exponent) > MAX_EXPONENT:
        raise MesetaError(f"{operator}: exponent {exponent} must be in {-MAX_EXPONENT}..{MAX_EXPONENT}")
    rows = []
    while rest:
        count, *rest = rest
        if not 0 <= count <= len(rest) or min(rest[:count], default=0) < 0:
            raise MesetaError(
                f"{operator}: pieces are {rest[: max(count, 0)]}; give the columns of each, none of them negative"
            )
        rows.append(RowLayout(codec, tuple(rest[:count])))
        rest = rest[count:]
    return CodecLayouts(exponent, tuple(rows))


class RandomSource(NamedTuple):
    """Where the random words of a row come from: per piece a key, as int64, and its first column; the first row."""

    keys: tuple[int, ...]
    columns: tuple[int, ...]
    first_row: int


def unpack_random_source(operator: str, layout: RowLayout, random: Sequence[int]) -> RandomSource | None:
    """Of keys, columns and the first row; None for no numbers, which round to the nearest. Raises MesetaError where
    they do not fit the pieces."""
    if not random:
        return None
    count = len(layout.pieces)
    if not layout.codec.scale_bytes:
        raise MesetaError(
            f"{operator}: {layout.codec.name} rounds to the nearest; give no rounding, or take a codec of 8 bits"
        )
    if len(random) != 2 * count + 1:
        raise MesetaError(
            f"{operator}: rounding has {len(random) - 1} keys and columns for {count} pieces; give one of each for each"
        )
    draw = RandomSource(tuple(random[:count]), tuple(random[count : 2 * count]), random[-1])
    for column in draw.columns:
        if column < 0 or column % COLUMN_BLOCK or column >= 1 << 34:
            raise MesetaError(
                f"{operator}: a piece begins with column {column} of its table; blocks need a multiple of "
                f"{COLUMN_BLOCK} from 0 on; cut tables there"
            )
    if not 0 <= draw.first_row < 1 << 62:
        raise MesetaError(
            f"{operator}: the first row has number {draw.first_row}; rows are numbered from 0 on, below 2**62"
        )
    return draw
