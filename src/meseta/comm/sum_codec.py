"""Encoding of inter-host sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves
from meseta.sparse.shapes import Int
from meseta.spec import COLUMN_BLOCK
from meseta.spec.codecs import Codec

ONE_BLOCK = (COLUMN_BLOCK,)
_COPY_BLOCK = pack_moves([ColumnMove(0, 0, 0, COLUMN_BLOCK)])
DENSE_FP16_EXPONENT = 10
"""Exponent k of the factor 2^k for dense gradients in fp16. 6e-8 keeps 11 bits of precision, and 63 does not
overflow."""


@dataclass(frozen=True)
class SumCodec:
    """Codec of a float32 buffer, which is encoded in blocks of `COLUMN_BLOCK` elements."""

    codec: Codec
    num_encoded: int
    """Number of leading elements that are encoded, a multiple of `COLUMN_BLOCK`. The others are sent as float32."""
    rounding_key: tuple[int, int, str]
    """Seed, step and name from which stochastic rounding is derived."""
    half_range: HalfRange
    """Range of values in fp16. Other codecs ignore it."""
    block_ids: Int[Tensor, " blocks"] | None = None
    """Number of each block in the key of stochastic rounding. `None` means the index of the block in the buffer."""

    @property
    def encoded_block_bytes(self) -> int:
        return self.codec.row_bytes(ONE_BLOCK)

    def encoded_bytes(self, count: int) -> int:
        """Return the encoded size of `count` elements, a multiple of `COLUMN_BLOCK`."""
        return count // COLUMN_BLOCK * self.encoded_block_bytes

    def encode(self, piece: Tensor, out: Tensor, first: int, host: int | None) -> None:
        """Encode `piece` [n] into `out`, uint8 [bytes].

        `first` is the index of the first element of the piece in the buffer. `host` is the host whose sum is encoded,
        or `None` for the total of all hosts.
        """
        view, half = out.view(-1, self.encoded_block_bytes), self.half_range if self.codec.name == "fp16" else None
        rounding = self._make_rounding(first // COLUMN_BLOCK, view.shape[0], host) if self.codec.scale_bytes else None
        sources = [piece.view(-1, COLUMN_BLOCK)]
        encode_columns(view, sources, _COPY_BLOCK, self.codec, ONE_BLOCK, rounding=rounding, half_range=half)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        view, matrix = coded.view(-1, self.encoded_block_bytes), out.view(-1, COLUMN_BLOCK)
        decode_columns(matrix, [view], _COPY_BLOCK, self.codec, [ONE_BLOCK], exponent=self.half_range.exponent)

    def _make_rounding(self, first: int, count: int, host: int | None) -> StochasticRounding:
        # Errors would add up if the sums of hosts and the total were rounded with the same random numbers.
        numbers = first if self.block_ids is None else self.block_ids[first : first + count]
        seed, step, name = self.rounding_key
        key = rounding_key(seed, step, name if host is None else f"{name} of host {host}")
        return StochasticRounding((key,), (0,), numbers)


def round_up_to_blocks(count: int) -> int:
    """Round a number of elements up to a multiple of the block size."""
    return -(-count // COLUMN_BLOCK) * COLUMN_BLOCK


def pad_to_blocks(buffer: Tensor) -> Tensor:
    """Return `buffer` [n] padded with zeros to a whole number of blocks."""
    missing = round_up_to_blocks(buffer.numel()) - buffer.numel()
    return buffer if not missing else torch.cat([buffer, buffer.new_zeros(missing)])
