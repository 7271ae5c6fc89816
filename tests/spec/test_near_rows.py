"""How many rows of each piece lie near, where a plan does not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.spec.tiers import DEFAULT_CACHE_SHARE, StorageOptions

pieces = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5000)), min_size=1, max_size=8)


@given(pieces=pieces, cache_bytes=st.none() | st.integers(1, 10**7))
def test_what_there_is_goes_by_halves(pieces: list[tuple[int, int]], cache_bytes: int | None) -> None:
    """Of two pieces the larger has no fewer, no piece has more than it has, and nearly all room is used and no more."""
    row_bytes, num_rows = [own[0] for own in pieces], [own[1] for own in pieces]
    near = StorageOptions(cache_bytes=cache_bytes).allocate_cache_rows(row_bytes, num_rows)
    assert all(1 <= some <= count for some, count in zip(near, num_rows, strict=True))
    by_size = [some for _, some in sorted(zip(num_rows, near, strict=True))]
    assert by_size == sorted(by_size)
    whole = sum(of_row * count for of_row, count in pieces)
    room = DEFAULT_CACHE_SHARE * whole if cache_bytes is None else min(cache_bytes, whole)
    used = sum(of_row * some for of_row, some in zip(row_bytes, near, strict=True))
    slack = 2 * sum(row_bytes)  # rows are whole, and each piece has one at least
    assert room - slack <= used <= room + sum(row_bytes)


@pytest.mark.parametrize(
    ("cache_bytes", "near"),
    [
        # 5,000 bytes: 40 rows and 230 of each other table. 5,000 more for 800 and 1,870 rows: 500 / 2,670 of them.
        (10_000, [40, 230 + 149, 230 + 350]),
        # 300 bytes: 10 rows of each; 300 more for 30, 1,020 and 2,090 rows: 30 / 3,140 of them.
        (600, [10, 10 + 9, 10 + 19]),
        (31_700, [40, 1030, 2100]),
    ],
)
def test_small_tables_lie_near_whole(cache_bytes: int, near: list[int]) -> None:
    assert StorageOptions(cache_bytes=cache_bytes).allocate_cache_rows([10, 10, 10], [40, 1030, 2100]) == near


def test_the_index_of_rows_on_a_disk_takes_part_of_the_room() -> None:
    row_bytes, num_rows = [10, 10, 10], [40, 1030, 2100]
    with_index = StorageOptions(cache_bytes=10_000 + 4 * 3170).allocate_cache_rows(
        row_bytes, num_rows, index_bytes=4 * 3170
    )
    assert with_index == StorageOptions(cache_bytes=10_000).allocate_cache_rows(row_bytes, num_rows)
    assert StorageOptions(cache_bytes=100).allocate_cache_rows(row_bytes, num_rows, index_bytes=4 * 3170) == [1, 1, 1]


@pytest.mark.parametrize(
    ("lookahead", "tiers", "num_batches"),
    [(None, {"disk", "hbm"}, 3), (None, {"cached"}, 2), (None, {"hbm"}, 1), (0, {"disk"}, 1), (8, {"cached"}, 9)],
)
def test_batches_near_at_once(lookahead: int | None, tiers: set[str], num_batches: int) -> None:
    assert StorageOptions(lookahead=lookahead).num_cached_batches(tiers) == num_batches
