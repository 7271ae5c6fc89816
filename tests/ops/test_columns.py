"""Tests of moved columns against sums by plain indices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.columns import ColumnMove, pack_moves, place_columns
from meseta.spec import MesetaError


@st.composite
def moves_of(draw: st.DrawFn, widths: list[int], num_columns: int) -> list[ColumnMove]:
    moves = []
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, len(widths) - 1))
        width = draw(st.integers(0, min(widths[source], num_columns)))
        start, to = draw(st.integers(0, widths[source] - width)), draw(st.integers(0, num_columns - width))
        moves.append(ColumnMove(source, start, to, width, draw(st.integers(0, 1))))
    return moves


@given(data=st.data(), num_rows=st.sampled_from([0, 1, 5, 64, 700]))
def test_moves_are_done_in_their_order(data: st.DataObject, num_rows: int) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    widths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    num_columns, scale = data.draw(st.integers(0, 50)), data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    moves = data.draw(moves_of(widths, num_columns))
    wide = data.draw(st.booleans())  # sources with strides
    sources = [torch.randn(num_rows, width + 3 * wide).to(dtype)[:, :width] for width in widths]
    expected = torch.randn(num_rows, num_columns).to(dtype)
    whole = torch.cat([expected, torch.full((num_rows, 2), 7.0, dtype=dtype)], dim=1)
    for move in moves:
        for column in range(move.width):
            moved = sources[move.source][:, move.start + column] * scale
            place = expected[:, move.target + column]
            place.copy_(place + moved if move.add else moved)
    with use_num_threads(data.draw(st.sampled_from([1, 2]))):
        place_columns(whole[:, :num_columns], sources, pack_moves(moves), scale)
    torch.testing.assert_close(whole[:, :num_columns], expected, rtol=0, atol=0)
    assert bool((whole[:, num_columns:] == 7).all())


def test_neighbours_move_together() -> None:
    moves = [
        ColumnMove(0, 0, 8, 2),
        ColumnMove(0, 2, 10, 3),
        ColumnMove(0, 5, 20, 1),
        ColumnMove(1, 6, 21, 1),
        ColumnMove(1, 7, 22, 1, add=1),
    ]
    assert pack_moves(moves) == (0, 0, 8, 5, 0, 0, 5, 20, 1, 0, 1, 6, 21, 1, 0, 1, 7, 22, 1, 1)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (ColumnMove(1, 0, 0, 1), "source 1 is outside 0..0"),
        (ColumnMove(0, 2, 0, 2), "2 columns from column 2 of 3"),
        (ColumnMove(0, 0, 4, 1), "cannot move to column 4 of 4"),
        (ColumnMove(0, 0, 0, -1), "-1 columns"),
        (ColumnMove(0, -1, 0, 1), "from column -1 of 3"),
    ],
)
def test_columns_outside_are_refused(move: ColumnMove, words: str) -> None:
    out, source = torch.zeros(2, 4), torch.ones(2, 3)
    with pytest.raises(MesetaError, match=words):
        place_columns(out, [source], move)
    assert not out.any()


@pytest.mark.parametrize(
    ("out", "source", "moves"),
    [
        (torch.zeros(2, 4), torch.ones(3, 4), ()),
        (torch.zeros(2, 4), torch.ones(2, 4).double(), ()),
        (torch.zeros(2, 4), torch.ones(4), ()),
        (torch.zeros(2, 4).half(), torch.ones(2, 4).half(), ()),
        (torch.zeros(4, 2).t(), torch.ones(2, 4), ()),
        (torch.zeros(2, 4), torch.ones(2, 4), (1, 2)),
    ],
)
def test_matrices_that_do_not_fit(out: torch.Tensor, source: torch.Tensor, moves: tuple[int, ...]) -> None:
    with pytest.raises(MesetaError, match="place_columns"):
        place_columns(out, [source], moves)


def test_opcheck() -> None:
    arguments = (torch.zeros(3, 4), [torch.ones(3, 2), torch.ones(3, 5)], [0, 0, 1, 2, 0, 1, 1, 1, 3, 1], 0.5)
    torch.library.opcheck(torch.ops.meseta.place_columns.default, arguments)
