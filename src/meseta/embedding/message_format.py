"""Layout of the matrices of an exchange in messages between ranks, as numbers or encoded by a codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves, place_columns
from meseta.ops.memory import empty
from meseta.sparse.shapes import Int
from meseta.spec.codecs import FP32, Codec

# A message is a sequence of matrices. Without a codec, a buffer has numbers:
#
#     | direct bags [B, columns] | partial bags [n, columns] | rows of a route [ids, columns] | ...
#
# With a codec, a buffer has bytes. Data that stays inside a host is not encoded. It comes first, where it is aligned:
#
#     | partial bags, float32 | direct bags, encoded | rows of a route, encoded | ... | up to 3 padding bytes

MAX_BAG_SIZE = 2**31
"""Exclusive upper bound of the number of ids in a bag."""


class MatrixLayout(NamedTuple):
    """Shape and encoding of one matrix in a message."""

    num_rows: int
    pieces: tuple[int, ...]
    """Number of columns of each adjacent piece. Each piece starts a new block of the codec."""
    is_intra_host: bool = False
    """Whether the matrix is only sent inside a host, and therefore not encoded."""

    @property
    def width(self) -> int:
        return sum(self.pieces)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.width


MessageLayout = Sequence[MatrixLayout]


@dataclass(frozen=True)
class MessageFormat:
    """Format of messages of one kind."""

    dtype: torch.dtype
    """Dtype of numbers that are not encoded."""
    device: torch.device
    codec: Codec = FP32
    is_mixed: bool = False
    """Whether a message may have both intra-host matrices and others."""
    half_range: HalfRange = field(default_factory=HalfRange)

    @property
    def is_lossless(self) -> bool:
        return self.codec.is_lossless

    def message_sizes(self, messages: Sequence[MessageLayout]) -> list[int]:
        """Return the number of entries of each message in a buffer. An entry is a number, or a byte with a codec."""
        return [self._message_size(message) for message in messages]

    def _message_size(self, message: MessageLayout) -> int:
        if self.is_lossless:
            return sum(matrix.num_rows * matrix.width for matrix in message)
        return sum(self._matrix_bytes(message))

    def _order(self, message: MessageLayout) -> Sequence[int]:
        """Return the order of matrices in a message with a codec. Intra-host matrices come first."""
        places = range(len(message))
        return sorted(places, key=lambda index: not message[index].is_intra_host) if self.is_mixed else places

    def _matrix_bytes(self, message: MessageLayout) -> list[int]:
        """Return the size of each matrix in a message with a codec. With mixed matrices, the size of the padding
        follows."""
        lengths = [message[index].num_rows * self.row_bytes(message[index]) for index in self._order(message)]
        return [*lengths, -sum(lengths) % 4] if self.is_mixed else lengths

    def row_bytes(self, matrix: MatrixLayout) -> int:
        if matrix.is_intra_host:
            return matrix.width * self.dtype.itemsize
        return self.codec.row_bytes(matrix.pieces)

    def empty(self, messages: Sequence[MessageLayout]) -> Tensor:
        """Allocate a buffer for consecutive messages."""
        return empty((sum(self.message_sizes(messages)),), self.dtype if self.is_lossless else torch.uint8, self.device)

    def views(self, buffer: Tensor, messages: Sequence[MessageLayout]) -> list[list[Tensor]]:
        """Return views of the matrices of each message in a buffer.

        A view is [rows, columns] of numbers, or uint8 [rows, bytes] if the matrix is encoded.
        """
        if self.is_lossless:
            pieces = iter(buffer.split([m.num_rows * m.width for message in messages for m in message]))
            return [[next(pieces).view(matrix.shape) for matrix in message] for message in messages]
        pieces = iter(buffer.split([length for message in messages for length in self._matrix_bytes(message)]))
        views = list[list[Tensor]]()
        for message in messages:
            places = {index: self._view(next(pieces), message[index]) for index in self._order(message)}
            views.append([places[index] for index in range(len(message))])
            if self.is_mixed:
                next(pieces)  # padding
        return views

    def _view(self, piece: Tensor, matrix: MatrixLayout) -> Tensor:
        if not piece.numel():  # An empty piece may have an unaligned address.
            return self._empty_view(matrix)
        if matrix.is_intra_host:
            return piece.view(self.dtype).view(matrix.shape)
        return piece.view(matrix.num_rows, -1)

    def _empty_view(self, matrix: MatrixLayout) -> Tensor:
        shape = matrix.shape if matrix.is_intra_host else (matrix.num_rows, self.row_bytes(matrix))
        return torch.empty(shape, dtype=self.dtype if matrix.is_intra_host else torch.uint8, device=self.device)

    def write(
        self,
        view: Tensor,
        matrix: MatrixLayout,
        sources: Sequence[Tensor],
        moves: Sequence[int] | None = None,
        scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """Write columns of the sources [rows, ...] times `scale` to a matrix in a buffer.

        `moves` of `None` writes all columns of a single source.
        """
        moves = full_row_move(matrix.width) if moves is None else moves
        if self.is_lossless or matrix.is_intra_host:
            place_columns(view, sources, moves, scale)
        else:
            half = self.half_range if self.codec.name == "fp16" else None
            encode_columns(
                view, sources, moves, self.codec, matrix.pieces, scale=scale, rounding=rounding, half_range=half
            )

    def pack(self, matrix: MatrixLayout, sources: Sequence[Tensor], moves: Sequence[int] | None = None) -> Tensor:
        """Write one matrix to a new buffer, and return its view. `moves` of `None` writes all columns of one source."""
        if moves is None and self.is_lossless:
            return sources[0]
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, sources, moves)
        return view

    def decode_into(
        self, out: Tensor, views: Sequence[Tensor], matrices: Sequence[MatrixLayout], moves: Sequence[int]
    ) -> None:
        """Write columns of received matrices to `out` [rows, ...]. With a codec, all matrices must be encoded."""
        if self.is_lossless:
            place_columns(out, views, moves)
        else:
            pieces = [matrix.pieces for matrix in matrices]
            decode_columns(out, views, moves, self.codec, pieces, exponent=self.half_range.exponent)

    def decode(self, view: Tensor, matrix: MatrixLayout) -> Tensor:
        """Return a received matrix as numbers [rows, columns]."""
        if self.is_lossless or matrix.is_intra_host:
            return view
        out = empty(matrix.shape, self.dtype, self.device)
        self.decode_into(out, [view], [matrix], full_row_move(matrix.width))
        return out

    def decode_all(self, views: Sequence[Tensor], pieces: tuple[int, ...]) -> Tensor:
        """Concatenate received matrices with the same columns, and return them as numbers [all rows, columns]."""
        joined = torch.cat(list(views))
        return self.decode(joined, MatrixLayout(joined.shape[0], pieces))

    def round_trip(self, values: Tensor, pieces: tuple[int, ...], rounding: StochasticRounding | None = None) -> Tensor:
        """Encode and decode `values` [rows, columns], as an exchange does."""
        if self.is_lossless:
            return values
        matrix = MatrixLayout(values.shape[0], pieces)
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, [values], rounding=rounding)
        return self.decode(view, matrix)


class MessageFormats(NamedTuple):
    """Formats of the messages of one exchange."""

    direct: MessageFormat
    """Format between owners and requesting ranks. Its messages may have intra-host matrices."""
    inter_host: MessageFormat


def gradient_exponent(num_samples: int) -> int:
    """Return the exponent k of the factor 2^k for gradients in fp16. A mean over many samples has small gradients."""
    return max(num_samples - 1, 0).bit_length()


def full_row_move(width: int) -> tuple[int, ...]:
    """Return the move that copies all columns of one source."""
    return pack_moves([ColumnMove(0, 0, 0, width)])


@dataclass(frozen=True)
class GradientRounding:
    """Stochastic rounding of the gradients of one batch, independent of the plan and the exchange algorithm."""

    # Random numbers are derived from the seed, the step, the feature, the global sample and the column. For unpooled
    # features they also depend on the position in the bag.

    seed: int
    step: int
    feature_names: Sequence[str]
    first_sample: int
    """Index of the first sample of this rank in the global batch."""
    lengths: Int[Tensor, " F_times_B"]
    """Length of each bag of this rank, ordered by (feature, sample)."""

    @cached_property
    def keys(self) -> tuple[int, ...]:
        return tuple(rounding_key(self.seed, self.step, name) for name in self.feature_names)

    def bag_rounding(self, pieces: Sequence[tuple[int, int]]) -> StochasticRounding:
        """Return the rounding of bags of this rank. `pieces` are pairs (feature, first column)."""
        keys = tuple(self.keys[feature] for feature, _ in pieces)
        return StochasticRounding(keys, tuple(column for _, column in pieces), self.first_sample)

    def row_positions(self, feature: int) -> Int[Tensor, " nnz"]:
        """Return a number for each id of an unpooled feature that combines its global sample and its position in the
        bag."""
        lengths = self.lengths.view(len(self.feature_names), -1)[feature].to(torch.int64)
        firsts = lengths.cumsum(0) - lengths
        samples = self.first_sample + torch.arange(lengths.numel(), device=lengths.device)
        bag_numbers = torch.repeat_interleave(samples * MAX_BAG_SIZE - firsts, lengths)
        return bag_numbers + torch.arange(bag_numbers.numel(), device=lengths.device)

    def row_rounding(self, feature: int, column: int, numbers: Tensor) -> StochasticRounding:
        """Return the rounding of rows of an unpooled feature. `numbers` are selected from `row_positions`."""
        return StochasticRounding((self.keys[feature],), (column,), numbers)
