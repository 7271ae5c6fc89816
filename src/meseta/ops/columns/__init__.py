"""Put columns of several matrices side by side: answers of ranks into features, and gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.ops.columns import reference
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.spec import MesetaError


class ColumnMove(NamedTuple):
    """Some columns of a matrix, and where they go."""

    source: int
    """Index of the matrix."""
    start: int
    """First column there."""
    target: int
    """First column of the result."""
    width: int
    """How many columns."""
    add: int = 0
    """1: added to what earlier moves brought there. 0: written over it."""


def pack_moves(moves: Iterable[ColumnMove]) -> tuple[int, ...]:
    """The same moves, as numbers for `place_columns`, neighbours made one where they are neighbours on both sides."""
    joined: list[ColumnMove] = []
    for move in moves:
        last = joined[-1] if joined else None
        follows = last is not None and move == (
            last.source, last.start + last.width, last.target + last.width, move.width, last.add,
        )  # fmt: skip
        if last is not None and follows:
            joined[-1] = last._replace(width=last.width + move.width)
        else:
            joined.append(move)
    return tuple(number for move in joined for number in move)


def unpack_moves(numbers: Sequence[int]) -> list[ColumnMove]:
    """The moves that `pack_moves` has made numbers of."""
    size = len(ColumnMove._fields)
    return [ColumnMove(*numbers[first : first + size]) for first in range(0, len(numbers), size)]


def place_columns(out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], scale: float = 1.0) -> None:
    """Write columns of the sources, [B, any] each, times `scale` to `out` [B, columns], in place.

    `moves` are those that `pack_moves` returns. In each row they are done one after the other, so sums are added in
    their order. Columns that no move names stay. All matrices have one type, float32 or float64; `out` has contiguous
    columns and shares no memory with a source. Raises MesetaError for matrices that do not fit together and, on a CPU,
    for columns outside them.
    """
    _operator(out, list(sources), list(moves), scale)


def _check(out: Tensor, sources: list[Tensor], moves: list[int]) -> None:
    for index, matrix in enumerate((out, *sources)):
        if matrix.dim() != 2 or matrix.dtype != out.dtype or matrix.shape[0] != out.shape[0]:
            raise MesetaError(
                f"place_columns: matrix {index} is {matrix.dtype} {list(matrix.shape)}, but the result is {out.dtype} "
                f"{list(out.shape)}; all must have one type and as many rows"
            )
    apart = out.numel() > 0 and out.stride(1) != 1  # an empty matrix of numpy has strides of 0
    if out.dtype not in (torch.float32, torch.float64) or apart or len(moves) % len(ColumnMove._fields):
        raise MesetaError(
            f"place_columns: {len(moves)} numbers of moves, and a result of {out.dtype} with strides {out.stride()}; "
            "give five numbers for each move, and float32 or float64 with contiguous columns"
        )


def _cpu(out: Tensor, sources: list[Tensor], moves: list[int], scale: float) -> None:
    _check(out, sources, moves)
    rows = [source if source.stride(1) == 1 else source.contiguous() for source in sources]
    described = [number for m in rows for number in (m.data_ptr(), m.size(1), m.stride(0))]
    try:
        core().place_columns(
            [out.data_ptr(), out.size(0), out.size(1), out.stride(0)],
            described,
            moves,
            scale,
            out.dtype == torch.float64,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"place_columns: {error}") from None


def _gpu(out: Tensor, sources: list[Tensor], moves: list[int], scale: float) -> None:
    _check(out, sources, moves)
    reference.place_columns(out, sources, moves, scale)


def _fake(out: Tensor, sources: list[Tensor], moves: list[int], scale: float) -> None:
    return None


_operator = register(
    "place_columns(Tensor(a!) out, Tensor[] sources, int[] moves, float scale) -> ()", cpu=_cpu, cuda=_gpu, fake=_fake
)
