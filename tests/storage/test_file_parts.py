"""Tests that frozen rows of a file are read part by part: selected rows, with the memory of a few parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meseta.ops.row_file import DiskEngine, RowFile
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec.tiers import NUM_PREFETCHED_PARTS
from meseta.storage import selection
from meseta.storage.selection import SnapshotReader

WIDTHS = (256, 4)
PART_ROWS, NUM_PARTS, BLOCK_ROWS = 2048, 24, 512
RECORD_BYTES = sum(WIDTHS)


class Live:
    """Counts the bytes of live tensors made by `empty`."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.now += made.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(made.untyped_storage(), self._free, made.nbytes)
        return made

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    made = Live()
    monkeypatch.setattr(selection, "empty", made.empty)
    return made


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[RowFile, np.ndarray[Any, Any]]]:
    """Return a file whose rows, except every seventh, were written in random order, and its content."""
    num_rows, random = NUM_PARTS * PART_ROWS - 100, np.random.default_rng(0)
    records = random.integers(0, 256, (num_rows, RECORD_BYTES), dtype=np.uint8)
    file = RowFile(
        DiskEngine(tmp_path), "t", num_rows=num_rows, record_bytes=RECORD_BYTES, part_bytes=PART_ROWS * RECORD_BYTES
    )
    assert file.part_rows == PART_ROWS
    rows = random.permutation(np.flatnonzero(np.arange(num_rows) % 7))
    for some in np.array_split(rows, 20):
        file.write(torch.from_numpy(some), records[some])
    file.flush()
    yield file, records
    file.close()


def select_rows(kind: str, num_rows: int) -> RowSet:
    rows, random = RowSet(num_rows), np.random.default_rng(1)
    if kind == "all":
        rows.add_range(0, num_rows)
    elif kind == "every third part":  # parts between them are skipped, and most blocks of these parts
        for first in range(0, num_rows, 3 * PART_ROWS):
            rows.add_range(first + 10, first + 13)
    elif kind == "blocks":
        for first in range(0, num_rows, 3 * BLOCK_ROWS):
            rows.add_range(first, min(first + BLOCK_ROWS, num_rows))
    else:
        rows.add(torch.from_numpy(np.flatnonzero(random.random(num_rows) < float(kind))))
    return rows


@pytest.mark.parametrize("kind", ["all", "every third part", "blocks", "0.001", "0.3"])
def test_selected_rows_are_read_and_few_parts_are_in_memory(
    kind: str, live: Live, written: tuple[RowFile, np.ndarray[Any, Any]]
) -> None:
    file, records = written
    before, selected = file.counters, select_rows(kind, file.num_rows)
    frozen = SnapshotReader(file.snapshot(), WIDTHS, None if kind == "all" else selected)
    file.write(torch.arange(file.num_rows), np.zeros_like(records))  # later writes are not visible
    for first in range(0, file.num_rows, BLOCK_ROWS):
        stop = min(first + BLOCK_ROWS, file.num_rows)
        rows = selected.rows(first, stop).numpy()
        if not len(rows):
            continue
        values, present = frozen.read(first, stop)
        assert np.array_equal(present.numpy(), rows % 7 > 0)
        joined = torch.cat(values, 1).numpy()
        assert np.array_equal(joined[present.numpy()], records[rows][present.numpy()])
        del values
    assert 0 < live.most <= (NUM_PREFETCHED_PARTS + 1) * PART_ROWS * RECORD_BYTES
    assert live.now == 0, "parts of which all selected rows were taken are still in memory"
    if kind in ("every third part", "0.001"):
        read = file.counters.read_bytes - before.read_bytes
        assert read < 0.15 * records.nbytes, "rows that were not selected were read"
    frozen.close()


def test_a_selection_that_is_given_up_frees_its_parts(
    live: Live, written: tuple[RowFile, np.ndarray[Any, Any]]
) -> None:
    file, _ = written
    frozen = SnapshotReader(file.snapshot(), WIDTHS)
    frozen.read(0, 1)
    assert live.now > 0
    frozen.close()
    assert live.now == 0
