"""How the matrices of an exchange lie in what ranks send each other: as numbers, or in the bytes of a codec.

A message to one rank is some matrices, one behind the other. Without a codec a buffer has numbers:

    | direct bags [B, columns] | partial bags [n, columns] | rows of a route [ids, columns] | ...

and with one it has bytes. What stays inside a host travels as it was computed; it comes first, where its numbers are
aligned:

    | partial bags, float32 | direct bags, encoded | rows of a route, encoded | ... | up to 3 empty bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves, place_columns
from meseta.ops.memory import empty
from meseta.spec.codecs import FP32, Codec

MAX_BAG_SIZE = 2**31
"""More than the ids of any bag."""


class MatrixLayout(NamedTuple):
    """One matrix of a message."""

    num_rows: int
    pieces: tuple[int, ...]
    """Columns of what lies side by side, each in blocks of its own."""
    is_intra_host: bool = False
    """Whether it travels inside a host alone, as it was computed."""

    @property
    def width(self) -> int:
        return sum(self.pieces)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.width


MessageLayout = Sequence[MatrixLayout]


@dataclass(frozen=True)
class MessageFormat:
    """How one kind of matrices is written."""

    dtype: torch.dtype
    """Of numbers as they are computed."""
    device: torch.device
    codec: Codec = FP32
    is_mixed: bool = False
    """Whether messages have matrices that stay inside beside others."""
    half_range: HalfRange = field(default_factory=HalfRange)
    """Of fp16."""

    @property
    def is_lossless(self) -> bool:
        """Whether all travels as it was computed."""
        return self.codec.is_lossless

    def message_sizes(self, messages: Sequence[MessageLayout]) -> list[int]:
        """Entries of each message in a buffer: numbers, or bytes."""
        return [self._message_size(message) for message in messages]

    def _message_size(self, message: MessageLayout) -> int:
        if self.is_lossless:
            return sum(matrix.num_rows * matrix.width for matrix in message)
        return sum(self._matrix_bytes(message))

    def _order(self, message: MessageLayout) -> Sequence[int]:
        """In which the matrices of a message lie, where there is a codec."""
        places = range(len(message))
        return sorted(places, key=lambda index: not message[index].is_intra_host) if self.is_mixed else places

    def _matrix_bytes(self, message: MessageLayout) -> list[int]:
        """Bytes of each matrix in this order, and those that are empty behind them."""
        lengths = [message[index].num_rows * self.row_bytes(message[index]) for index in self._order(message)]
        return [*lengths, -sum(lengths) % 4] if self.is_mixed else lengths

    def row_bytes(self, matrix: MatrixLayout) -> int:
        """Of a row of a matrix, where there is a codec."""
        if matrix.is_intra_host:
            return matrix.width * self.dtype.itemsize
        return self.codec.row_bytes(matrix.pieces)

    def empty(self, messages: Sequence[MessageLayout]) -> Tensor:
        """A buffer for messages, one behind the other."""
        return empty((sum(self.message_sizes(messages)),), self.dtype if self.is_lossless else torch.uint8, self.device)

    def views(self, buffer: Tensor, messages: Sequence[MessageLayout]) -> list[list[Tensor]]:
        """Of a buffer, for each message its matrices: [rows, columns] of numbers, or uint8 [rows, bytes] where they are
        encoded."""
        if self.is_lossless:
            pieces = iter(buffer.split([m.num_rows * m.width for message in messages for m in message]))
            return [[next(pieces).view(matrix.shape) for matrix in message] for message in messages]
        pieces = iter(buffer.split([length for message in messages for length in self._matrix_bytes(message)]))
        views = list[list[Tensor]]()
        for message in messages:
            places = {index: self._view(next(pieces), message[index]) for index in self._order(message)}
            views.append([places[index] for index in range(len(message))])
            if self.is_mixed:
                next(pieces)
        return views

    def _view(self, piece: Tensor, matrix: MatrixLayout) -> Tensor:
        if not piece.numel():  # may lie where no number could
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
        """Write columns of the sources, [rows, any], times `scale` to a matrix of a buffer; without `moves`, all of the
        one source."""
        moves = full_row_move(matrix.width) if moves is None else moves
        if self.is_lossless or matrix.is_intra_host:
            place_columns(view, sources, moves, scale)
        else:
            half = self.half_range if self.codec.name == "fp16" else None
            encode_columns(
                view, sources, moves, self.codec, matrix.pieces, scale=scale, rounding=rounding, half_range=half
            )

    def pack(self, matrix: MatrixLayout, sources: Sequence[Tensor], moves: Sequence[int] | None = None) -> Tensor:
        """A buffer of one matrix alone, by its rows; without `moves`, of all of the one source."""
        if moves is None and self.is_lossless:
            return sources[0]
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, sources, moves)
        return view

    def decode_into(
        self, out: Tensor, views: Sequence[Tensor], matrices: Sequence[MatrixLayout], moves: Sequence[int]
    ) -> None:
        """Write columns of matrices of a buffer to `out`, [rows, any]; none of them stays inside, where others do
        not."""
        if self.is_lossless:
            place_columns(out, views, moves)
        else:
            pieces = [matrix.pieces for matrix in matrices]
            decode_columns(out, views, moves, self.codec, pieces, exponent=self.half_range.exponent)

    def decode(self, view: Tensor, matrix: MatrixLayout) -> Tensor:
        """[rows, columns]: a matrix of a buffer as numbers."""
        if self.is_lossless or matrix.is_intra_host:
            return view
        out = empty(matrix.shape, self.dtype, self.device)
        self.decode_into(out, [view], [matrix], full_row_move(matrix.width))
        return out

    def decode_all(self, views: Sequence[Tensor], pieces: tuple[int, ...]) -> Tensor:
        """[all rows, columns]: matrices of a buffer, of the same columns, as one of numbers."""
        joined = torch.cat(list(views))
        return self.decode(joined, MatrixLayout(joined.shape[0], pieces))

    def round_trip(self, values: Tensor, pieces: tuple[int, ...], rounding: StochasticRounding | None = None) -> Tensor:
        """[rows, columns] as they come out where they have been sent."""
        if self.is_lossless:
            return values
        matrix = MatrixLayout(values.shape[0], pieces)
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, [values], rounding=rounding)
        return self.decode(view, matrix)


class MessageFormats(NamedTuple):
    """How what goes straight between ranks and owners is written, and what goes between twins."""

    direct: MessageFormat
    """Beside it may be what stays inside a host."""
    inter_host: MessageFormat


def gradient_exponent(num_samples: int) -> int:
    """Gradients of the mean over so many samples are small by their number; fp16 has them times 2 to this."""
    return max(num_samples - 1, 0).bit_length()


def full_row_move(width: int) -> tuple[int, ...]:
    """All columns, where they are."""
    return pack_moves([ColumnMove(0, 0, 0, width)])


@dataclass(frozen=True)
class GradientRounding:
    """What the stochastic rounding of the gradients of one batch is drawn by: seed, step and feature; global sample and
    column; of what is not pooled, place in the bag too. Where a table lies and which way a number takes does not
    matter."""

    seed: int
    step: int
    feature_names: Sequence[str]
    """Of the features."""
    first_sample: int
    """Place in the global batch of this rank's first sample."""
    lengths: Int[Tensor, " F_times_B"]
    """Ids of each bag of this rank, feature after feature."""

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """By feature."""
        return tuple(rounding_key(self.seed, self.step, name) for name in self.feature_names)

    def bag_rounding(self, pieces: Sequence[tuple[int, int]]) -> StochasticRounding:
        """Of a matrix of bags of this rank's samples, whose pieces are (feature, first column)."""
        keys = tuple(self.keys[feature] for feature, _ in pieces)
        return StochasticRounding(keys, tuple(column for _, column in pieces), self.first_sample)

    def row_positions(self, feature: int) -> Int[Tensor, " nnz"]:
        """Of each id of a feature that is not pooled: its sample and its place in the bag."""
        lengths = self.lengths.view(len(self.feature_names), -1)[feature].to(torch.int64)
        firsts = lengths.cumsum(0) - lengths
        samples = self.first_sample + torch.arange(lengths.numel(), device=lengths.device)
        bag_numbers = torch.repeat_interleave(samples * MAX_BAG_SIZE - firsts, lengths)
        return bag_numbers + torch.arange(bag_numbers.numel(), device=lengths.device)

    def row_rounding(self, feature: int, column: int, numbers: Tensor) -> StochasticRounding:
        """Of rows of a feature that is not pooled, whose `row_numbers` are these."""
        return StochasticRounding((self.keys[feature],), (column,), numbers)
