"""The loop that measures the limit reads every row once and completely."""

import itertools

import numpy as np
import pytest
import torch

from meseta.measure.gather_limit import CACHE_LEVELS, PREFETCH_DISTANCES, PrefetchHint, best_prefetches, gather
from meseta.measure.gather_limit.reference import checksum
from meseta.spec import MesetaError

pytest.importorskip("meseta._C")
NO_BOUNDS = [0, 4]


@pytest.mark.parametrize("width", [1, 2, 8, 10, 16, 32, 64, 70, 128, 200])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_checksum_equals_that_of_torch(width: int, num_threads: int) -> None:
    tables = [torch.randn(50, width), torch.randn(9, 24).half(), torch.randn(1, 2 * width).bfloat16()]
    rng = np.random.default_rng(width)
    ids = np.concatenate([rng.integers(0, table.shape[0], 700) for _ in range(2) for table in tables])
    bounds = list(range(0, ids.size + 1, 700))
    want = checksum(tables, ids, bounds)
    for prefetch in itertools.starmap(PrefetchHint, itertools.product(CACHE_LEVELS, (0, 1, 128, 5000), (1, 3, 32))):
        assert gather(tables, ids, bounds, prefetch, num_threads).checksum == want


def test_a_changed_element_changes_the_checksum() -> None:
    table, ids = torch.ones(4, 16), np.arange(4)
    before = gather([table], ids, NO_BOUNDS, PrefetchHint(2, 8), 1)
    table[3, 15] = 2.0
    after = gather([table], ids, NO_BOUNDS, PrefetchHint(2, 8), 1)
    assert before.checksum != after.checksum == checksum([table], ids, NO_BOUNDS)
    assert after.seconds > 0


def test_no_ids() -> None:
    assert gather([torch.ones(1, 1)], np.zeros(0, np.int64), [0, 0, 0], PrefetchHint(1, 4), 2).checksum == 0


def test_the_best_prefetches_are_distinct() -> None:
    best = best_prefetches([torch.ones(4, 16)], np.arange(4), NO_BOUNDS, 1)
    assert len(set(best)) == 3
    assert all(prefetch.level in CACHE_LEVELS and prefetch.distance in PREFETCH_DISTANCES for prefetch in best)


@pytest.mark.parametrize(
    ("ids", "bounds", "prefetch", "message"),
    [
        ([0, 1, 4, 2], [0, 4], PrefetchHint(1, 2), "id 4 at 2 is outside 0..3"),
        ([0, 1, -1, 2], [0, 4], PrefetchHint(1, 2), "id -1 at 2 is outside"),
        ([0, 1], [0, 3], PrefetchHint(1, 2), "bounds must start at 0 and end with the number of ids"),
        ([0, 1], [0, 2, 1, 2], PrefetchHint(1, 2), "bounds must not decrease"),
        ([0, 1], [], PrefetchHint(1, 2), "bounds must have one entry more"),
        ([0, 1], [0, 2], PrefetchHint(4, 2), "level 1, 2 or 3"),
        ([0, 1], [0, 2], PrefetchHint(1, -1), "distance must not be negative"),
        ([0, 1], [0, 2], PrefetchHint(1, 1, 0), "burst and num_threads at least 1"),
    ],
)
def test_wrong_input_is_refused(ids: list[int], bounds: list[int], prefetch: PrefetchHint, message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        gather([torch.ones(4, 16)], np.array(ids, np.int64), bounds, prefetch, 1)


def test_a_piece_of_a_table_is_refused() -> None:
    with pytest.raises(MesetaError, match="not a contiguous CPU tensor"):
        gather([torch.ones(4, 16)[:, :8]], np.arange(4), NO_BOUNDS, PrefetchHint(1, 2), 1)
