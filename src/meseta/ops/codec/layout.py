"""Layout of encoded rows, and the integers by which it is passed to the registered operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meseta.spec import COLUMN_BLOCK, MesetaError
from meseta.spec.codecs import CODECS, Codec

CODEC_LIST = tuple(CODECS.values())
# 2**exponent and 2**-exponent are then normal float32 numbers.
MAX_EXPONENT = 126
INT64_SIGN_BIT = 1 << 63


class ScaleBlock(NamedTuple):
    """Columns of a row that share a scale: `COLUMN_BLOCK` columns, or fewer at the end of a piece."""

    piece: int
    first_column: int
    """Index of the first column within the row."""
    width: int
    piece_column: int
    """Index of the first column within the piece."""


@dataclass(frozen=True)
class RowLayout:
    """Layout of an encoded row that consists of several pieces."""

    codec: Codec
    pieces: tuple[int, ...]

    @property
    def num_columns(self) -> int:
        """Total number of columns of all pieces."""
        return sum(self.pieces)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of an encoded row."""
        return self.codec.row_bytes(self.pieces)

    @property
    def scales_offset(self) -> int:
        """Byte offset of the scales within a row. Meaningless for 16-bit codecs, which have no scales."""
        return self.num_columns * self.codec.element_bytes + self.num_columns * self.codec.element_bytes % 2

    def blocks(self) -> tuple[ScaleBlock, ...]:
        """Return all blocks, in the order of their scales."""
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
    """Layouts of one or several encoded matrices with the same codec."""

    exponent: int
    rows: tuple[RowLayout, ...]


def pack_layouts(codec: Codec, exponent: int, pieces: Sequence[Sequence[int]]) -> list[int]:
    """Pack layouts into integers: codec, exponent, then for each matrix the number of pieces and their widths."""
    each = [number for widths in pieces for number in (len(widths), *widths)]
    return [CODEC_LIST.index(codec) if codec in CODEC_LIST else -1, exponent, *each]


def unpack_layouts(operator: str, numbers: Sequence[int]) -> CodecLayouts:
    """Unpack `pack_layouts`. Raises MesetaError for an unknown or lossless codec, bad exponent or negative width."""
    if len(numbers) < 2 or not 0 <= numbers[0] < len(CODEC_LIST):
        raise MesetaError(f"{operator}: the codec is not in meseta.spec.codecs; pass one of {', '.join(CODECS)}")
    codec, exponent, rest = CODEC_LIST[numbers[0]], numbers[1], list(numbers[2:])
    if codec.is_lossless:
        raise MesetaError(
            f"{operator}: {codec.name} needs no encoding; call meseta.ops.columns.place_columns, or choose "
            "another codec"
        )
    if abs(exponent) > MAX_EXPONENT:
        raise MesetaError(f"{operator}: exponent {exponent} must be in {-MAX_EXPONENT}..{MAX_EXPONENT}")
    rows = []
    while rest:
        count, *rest = rest
        if not 0 <= count <= len(rest) or min(rest[:count], default=0) < 0:
            raise MesetaError(
                f"{operator}: pieces are {rest[: max(count, 0)]}; pass the number of columns of each, at least 0"
            )
        rows.append(RowLayout(codec, tuple(rest[:count])))
        rest = rest[count:]
    return CodecLayouts(exponent, tuple(rows))


class RandomSource(NamedTuple):
    """Source of the random words of a row."""

    keys: tuple[int, ...]
    """Generator key for each piece, as int64."""
    columns: tuple[int, ...]
    """Column of the table at which each piece starts."""
    first_row: int
    """Number of the first row. Unused if each row has its own number."""


def unpack_random_source(operator: str, layout: RowLayout, random: Sequence[int]) -> RandomSource | None:
    """Unpack keys, columns and the first row. Returns `None` if `random` is empty, for rounding to nearest even.

    Raises MesetaError if they do not match the pieces, or if the codec has 16 bits.
    """
    if not random:
        return None
    count = len(layout.pieces)
    if not layout.codec.scale_bytes:
        raise MesetaError(
            f"{operator}: {layout.codec.name} has no stochastic rounding; pass no rounding, or choose fp8 or int8"
        )
    if len(random) != 2 * count + 1:
        raise MesetaError(
            f"{operator}: rounding has {len(random) - 1} keys and columns for {count} pieces; pass one each per piece"
        )
    draw = RandomSource(tuple(random[:count]), tuple(random[count : 2 * count]), random[-1])
    for column in draw.columns:
        if column < 0 or column % COLUMN_BLOCK or column >= 1 << 34:
            raise MesetaError(
                f"{operator}: rounding.columns contains {column}; a piece must start at a multiple of "
                f"{COLUMN_BLOCK} columns, below 2**34; split tables there"
            )
    if not 0 <= draw.first_row < 1 << 62:
        raise MesetaError(f"{operator}: the first row has number {draw.first_row}; row numbers must be in 0..2**62-1")
    return draw
