"""Offloaded rows have the bits of resident rows, over a covering array of all settings that affect their storage and
transfer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covering import allowed_pairs, times_met
from meseta.ops.row_file.engine import IO_URING, io_uring_unavailable_reason
from sampling import sample

from .pool import RankPool
from .tier_cases import AXES, CELLS, can_meet, train

Ranks = Callable[[int], RankPool]


def test_every_allowed_pair_of_values_occurs_twice() -> None:
    """The cells contain no other pair, and their number is near the minimum."""
    counts, allowed = times_met(CELLS), allowed_pairs(AXES, can_meet)
    assert set(counts) == set(allowed) and min(counts.values()) >= 2
    assert all([*cell] == [*AXES] for cell in CELLS)
    largest = max(len(AXES[a]) * len(AXES[b]) for a, b in (("optimizer", "overlap"), ("sharding", "overlap")))
    assert 2 * largest <= len(CELLS) <= 2.2 * largest


@pytest.mark.parametrize("cell", sample(CELLS, 1, seed=2301))
def test_many_steps_have_the_bits_of_resident_tables(ranks: Ranks, cell: dict[str, Any], tmp_path: Path) -> None:
    """Losses, logits, rows, states and the contents of whole and delta checkpoints are equal, while most lookups miss
    the cache."""
    if IO_URING in cell["tier"] and (why := io_uring_unavailable_reason()) is not None:
        pytest.skip(why)
    resident, tiered = (ranks(cell["ranks"]).run(train, cell, tmp_path, is_resident) for is_resident in (True, False))
    for got, expected in zip(tiered, resident, strict=True):
        assert (got.losses, got.checksums, got.pieces) == (expected.losses, expected.checksums, expected.pieces)
    rows, misses = (sum(getattr(one, name) for one in tiered) for name in ("num_rows", "num_misses"))
    assert 2 * misses > rows > 0
    assert not [*(tmp_path / "scratch").glob("*")]
