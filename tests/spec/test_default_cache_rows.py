"""Tests of the default number of cache rows of each shard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.spec.tiers import DEFAULT_CACHE_SHARE, StorageOptions

pieces = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5000)), min_size=1, max_size=8)


@given(pieces=pieces, cache_bytes=st.none() | st.integers(1, 10**7))
def test_memory_is_divided_among_shards(pieces: list[tuple[int, int]], cache_bytes: int | None) -> None:
    """A larger shard has at least as many cache rows, no shard has more than its rows, and nearly all memory is
    used."""
    row_bytes, num_rows = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    cache_rows = StorageOptions(cache_bytes=cache_bytes).allocate_cache_rows(row_bytes, num_rows)
    assert all(1 <= some <= count for some, count in zip(cache_rows, num_rows, strict=True))
    by_size = [some for _, some in sorted(zip(num_rows, cache_rows, strict=True))]
    assert by_size == sorted(by_size)
    whole = sum(of_row * count for of_row, count in pieces)
    room = DEFAULT_CACHE_SHARE * whole if cache_bytes is None else min(cache_bytes, whole)
    used = sum(of_row * some for of_row, some in zip(row_bytes, cache_rows, strict=True))
    slack = 2 * sum(row_bytes)  # counts are integers, and each shard has at least one row
    assert room - slack <= used <= room + sum(row_bytes)


@pytest.mark.parametrize(
    ("cache_bytes", "cache_rows"),
    [
        # 5,000 bytes: 40 rows and 230 of each other table. 5,000 more for 800 and 1,870 rows: 500 / 2,670 of them.
        (10_000, [40, 230 + 149, 230 + 350]),
        # 300 bytes: 10 rows of each; 300 more for 30, 1,020 and 2,090 rows: 30 / 3,140 of them.
        (600, [10, 10 + 9, 10 + 19]),
        (31_700, [40, 1030, 2100]),
    ],
)
def test_small_tables_are_cached_as_a_whole(cache_bytes: int, cache_rows: list[int]) -> None:
    assert StorageOptions(cache_bytes=cache_bytes).allocate_cache_rows([10, 10, 10], [40, 1030, 2100]) == cache_rows


def test_the_index_of_rows_on_disk_uses_cache_memory() -> None:
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
def test_number_of_batches_in_the_cache(lookahead: int | None, tiers: set[str], num_batches: int) -> None:
    assert StorageOptions(lookahead=lookahead).num_cached_batches(tiers) == num_batches
