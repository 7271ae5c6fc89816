"""How numbers of a transfer are written on the wire: types of 16 bits, and of 8 bits with a scale for each block.

codec   a number       a block of 16     a value is written as
-----   ------------   ---------------   ------------------------------------------------------------------
fp32    4 bytes        -                 itself (float64 rows: 8 bytes)
fp16    2 bytes        -                 the nearest, of the value times a power of two that all ranks know
bf16    2 bytes        -                 the nearest
fp8     1 byte, e4m3   2 bytes, bf16     value / scale, where scale >= largest of the block / 448
int8    1 byte         2 bytes, bf16     value / scale, where scale >= largest of the block / 127

A block never depends on where a table lies: 16 columns of a bag, of a row that is not pooled or of a replica's row, and
16 numbers of a dense parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meseta.spec.shards import COLUMN_BLOCK

CodecName = Literal["fp32", "fp16", "bf16", "fp8", "int8"]


@dataclass(frozen=True)
class Codec:
    """One way to write numbers."""

    name: CodecName
    """As configs and plans say it."""
    number_bytes: int
    """Of a number on the wire."""
    block_bytes: int = 0
    """Of the scale of a block of COLUMN_BLOCK numbers; 0: it has none."""
    largest: float = 0.0
    """What a scale maps the largest number of its block to, at most; 0: no scale."""

    @property
    def is_whole(self) -> bool:
        """Whether numbers travel as they were computed."""
        return self.name == "fp32"

    def row_bytes(self, pieces: tuple[int, ...]) -> int:
        """Of a row whose columns are those of several pieces side by side, each in blocks from its first column: the
        numbers, an empty byte where the scales would begin at an odd one, the scales."""
        numbers = sum(pieces) * self.number_bytes
        if not self.block_bytes:
            return numbers
        return numbers + numbers % 2 + self.block_bytes * sum(-(-width // COLUMN_BLOCK) for width in pieces)


FP32 = Codec("fp32", 4)
CODECS: dict[CodecName, Codec] = {
    codec.name: codec
    for codec in (FP32, Codec("fp16", 2), Codec("bf16", 2), Codec("fp8", 1, 2, 448.0), Codec("int8", 1, 2, 127.0))
}
"""By name."""
