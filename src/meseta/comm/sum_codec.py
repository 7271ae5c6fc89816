"""How the numbers of a sum are written where they cross hosts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves
from meseta.spec import COLUMN_BLOCK
from meseta.spec.codecs import Codec

ONE_BLOCK = (COLUMN_BLOCK,)
_COPY_BLOCK = pack_moves([ColumnMove(0, 0, 0, COLUMN_BLOCK)])
DENSE_FP16_EXPONENT = 10
"""Dense gradients in fp16 are multiplied by 2 to this: 6e-8 is still exact to 11 bits, and 63 fits."""


@dataclass(frozen=True)
class SumCodec:
    """Of one buffer, in blocks of COLUMN_BLOCK numbers from its beginning, float32."""

    codec: Codec
    num_encoded: int
    """Leading numbers that are encoded, a multiple of COLUMN_BLOCK; those behind travel as they are."""
    rounding_key: tuple[int, int, str]
    """Seed, step and name that stochastic rounding is drawn by."""
    half_range: HalfRange
    """Of fp16."""
    block_ids: Int[Tensor, " blocks"] | None = None
    """What each block is drawn by; None: its place."""

    @property
    def encoded_block_bytes(self) -> int:
        """Of an encoded block."""
        return self.codec.row_bytes(ONE_BLOCK)

    def encoded_bytes(self, count: int) -> int:
        """Of so many numbers, whole blocks."""
        return count // COLUMN_BLOCK * self.encoded_block_bytes

    def encode(self, piece: Tensor, out: Tensor, first: int, host: int | None) -> None:
        """Write a piece [n] of the buffer that begins at number `first` to `out`, uint8 [bytes]: what a host has, or
        where `host` is None, the sum of all."""
        view, half = out.view(-1, self.encoded_block_bytes), self.half_range if self.codec.name == "fp16" else None
        rounding = self._make_rounding(first // COLUMN_BLOCK, view.shape[0], host) if self.codec.scale_bytes else None
        sources = [piece.view(-1, COLUMN_BLOCK)]
        encode_columns(view, sources, _COPY_BLOCK, self.codec, ONE_BLOCK, rounding=rounding, half_range=half)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        """The way back, to `out` [n]."""
        view, matrix = coded.view(-1, self.encoded_block_bytes), out.view(-1, COLUMN_BLOCK)
        decode_columns(matrix, [view], _COPY_BLOCK, self.codec, [ONE_BLOCK], exponent=self.half_range.exponent)

    def _make_rounding(self, first: int, count: int, host: int | None) -> StochasticRounding:
        """Sums of hosts are drawn apart from each other and from their total, whose errors would else add up."""
        numbers = first if self.block_ids is None else self.block_ids[first : first + count]
        seed, step, name = self.rounding_key
        key = rounding_key(seed, step, name if host is None else f"{name} of host {host}")
        return StochasticRounding((key,), (0,), numbers)


def round_up_to_blocks(count: int) -> int:
    """Numbers up to the end of a block."""
    return -(-count // COLUMN_BLOCK) * COLUMN_BLOCK


def pad_to_blocks(buffer: Tensor) -> Tensor:
    """[n] -> [n or a few more], the last ones 0."""
    missing = round_up_to_blocks(buffer.numel()) - buffer.numel()
    return buffer if not missing else torch.cat([buffer, buffer.new_zeros(missing)])
