"""Copying of columns between matrices, such as from received embeddings to features, and of gradients in reverse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.ops.columns import reference
from meseta.ops.common import register
from meseta.ops.core import core
from meseta.spec import MesetaError


class ColumnMove(NamedTuple):
    """Columns of a source matrix and their target in the output."""

    source: int
    """Index of the source matrix."""
    start: int
    """First column in the source."""
    target: int
    """First column in the output."""
    width: int
    """Number of columns."""
    add: int = 0
    """1 if the columns are added to those of earlier moves, 0 if they overwrite them."""


def pack_moves(moves: Iterable[ColumnMove]) -> tuple[int, ...]:
    """Pack moves into integers for `place_columns`. Adjacent moves are merged if source and target continue."""
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
    """Unpack the result of `pack_moves`."""
    size = len(ColumnMove._fields)
    return [ColumnMove(*numbers[first : first + size]) for first in range(0, len(numbers), size)]


def place_columns(out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], scale: float = 1.0) -> None:
    """Copy columns of the sources, multiplied by `scale`, to `out`.

    Args:
        out: float32 or float64 [B, columns]. Columns must be contiguous. Columns without a move are unchanged.
        sources: Matrices [B, any] of the dtype of `out`. None may share memory with `out`.
        moves: Result of `pack_moves`. Moves are applied in order, so that sums are added in this order.
        scale: Factor by which columns are multiplied.

    Raises:
        MesetaError: Matrices do not match each other or, on a CPU, a column is outside its matrix.
    """
    _operator(out, list(sources), list(moves), scale)


def _check(out: Tensor, sources: list[Tensor], moves: list[int]) -> None:
    for index, matrix in enumerate((out, *sources)):
        if matrix.dim() != 2 or matrix.dtype != out.dtype or matrix.shape[0] != out.shape[0]:
            raise MesetaError(
                f"place_columns: matrix {index} is {matrix.dtype} {list(matrix.shape)}, but the output is {out.dtype} "
                f"{list(out.shape)}; all must have the same dtype and number of rows"
            )
    apart = out.numel() > 0 and out.stride(1) != 1  # Strides of an empty NumPy matrix are 0.
    if out.dtype not in (torch.float32, torch.float64) or apart or len(moves) % len(ColumnMove._fields):
        raise MesetaError(
            f"place_columns: moves have {len(moves)} numbers, and the output is {out.dtype} with strides "
            f"{out.stride()}; pass five numbers per move, and a float32 or float64 output with contiguous columns"
        )


def _cpu(out: Tensor, sources: list[Tensor], moves: list[int], scale: float) -> None:
    _check(out, sources, moves)
    # The core handles any row stride, but needs contiguous columns.
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
