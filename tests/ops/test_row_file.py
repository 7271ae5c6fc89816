"""Tests of row files: both engines hold the values of a dict while rows are written, cleaned and frozen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops.core import core
from meseta.ops.row_file import ROW_FILE_PART_BYTES, DiskEngine, RowFile, RowFileSnapshot
from meseta.ops.row_file.reference import InMemoryRowFile
from meseta.spec import MesetaError
from row_file_cases import ENGINES, records_of

SMALL = 4096
"""Bytes of a segment, small enough that few rows fill several segments."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> DiskEngine:
    return DiskEngine(tmp_path / "tier", request.param)


@dataclass
class Both:
    """A file and its oracle, with snapshots of both."""

    file: RowFile
    oracle: InMemoryRowFile
    frozen: list[tuple[RowFileSnapshot, InMemoryRowFile]] = field(default_factory=list)

    def write(self, rows: Tensor, seed: int) -> None:
        records = records_of(len(rows), self.file.record_bytes, seed)
        self.file.write(rows, *(value.contiguous() for value in self.cut(records)))
        self.oracle.write(rows, records)

    def cut(self, records: Tensor) -> tuple[Tensor, ...]:
        """Split records into three values if they have at least three bytes."""
        width = self.file.record_bytes
        return records.split([width // 2, width // 3, width - width // 2 - width // 3] if width > 2 else [width], dim=1)

    def check(self, rows: Tensor) -> None:
        here, there = (torch.zeros(len(rows), self.file.record_bytes, dtype=torch.uint8) for _ in range(2))
        assert torch.equal(self.file.read(rows, here).wait(), self.oracle.read(rows, there))
        assert torch.equal(here, there)

    def freeze(self) -> None:
        self.frozen.append((self.file.snapshot(), self.oracle.snapshot()))

    def check_frozen(self, first: int, stop: int) -> None:
        for rows, oracle in self.frozen:
            there = torch.zeros(stop - first, self.file.record_bytes, dtype=torch.uint8)
            values = [torch.zeros_like(value).contiguous() for value in self.cut(there)]
            present = rows.read(first, *values).wait()
            assert torch.equal(present, oracle.read(torch.arange(first, stop), there))
            assert torch.equal(torch.cat(values, dim=1), there)

    def thaw(self) -> None:
        if self.frozen:
            self.frozen.pop(0)[0].close()


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Draw actions, each with a seed and a number of rows."""
    kinds = st.sampled_from(["write", "write", "write", "read", "freeze", "read frozen", "thaw", "flush"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 1 << 30), st.integers(0, 300)), min_size=5, max_size=40))


@pytest.mark.parametrize("record_bytes", [1, 68, 260, 1032, 5000])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=actions(), num_rows=st.sampled_from([1, 50, 5000]), num_parts=st.sampled_from([1, 7]))
def test_equals_a_dict(
    engine: DiskEngine, record_bytes: int, steps: list[tuple[str, int, int]], num_rows: int, num_parts: int
) -> None:
    sizes = {"record_bytes": record_bytes, "segment_bytes": SMALL, "part_bytes": num_rows * record_bytes // num_parts}
    file = RowFile(engine, "t", num_rows=num_rows, **sizes)
    both = Both(file, InMemoryRowFile(num_rows, record_bytes))
    for kind, seed, count in steps:
        rows = torch.from_numpy(np.random.default_rng(seed).integers(0, num_rows, count))
        first = seed % (num_rows + 1)
        match kind:
            case "write":
                both.write(rows, seed)
            case "read":
                both.check(rows)
            case "freeze":
                both.freeze()
            case "read frozen":
                both.check_frozen(first, min(num_rows, first + count))
            case "thaw":
                both.thaw()
            case "flush":
                file.flush()
    both.check(torch.arange(num_rows))
    both.check_frozen(0, num_rows)
    assert file.num_written_rows == len(both.oracle.records)
    file.close()


def wait_for(is_so: Callable[[], bool], most_s: float = 60) -> None:
    end_s = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("record_bytes", "part_bytes"),
    [(68, ROW_FILE_PART_BYTES), pytest.param(260, 1_000_000, marks=pytest.mark.soak), (1032, ROW_FILE_PART_BYTES)],
)
def test_a_file_takes_one_and_a_half_of_its_rows(engine: DiskEngine, record_bytes: int, part_bytes: int) -> None:
    num_rows = 1_200_000 // record_bytes
    sizes = {"record_bytes": record_bytes, "segment_bytes": 2 * SMALL, "part_bytes": part_bytes}
    file = RowFile(engine, "t", num_rows=num_rows, **sizes)
    both = Both(file, InMemoryRowFile(num_rows, record_bytes))
    generator = torch.Generator().manual_seed(1)
    most = 1.5 * num_rows * record_bytes
    both.write(torch.arange(num_rows), 0)
    for seed in range(1, 13):
        both.write(torch.randperm(num_rows, generator=generator)[: num_rows // 4], seed)
        assert file.file_bytes <= most
    assert os.stat(file.path).st_blocks * 512 <= most
    frozen = file.snapshot()
    for seed in range(13, 17):
        both.write(torch.randperm(num_rows, generator=generator)[: num_rows // 4], seed)
    assert file.file_bytes > most  # segments of a snapshot stay
    frozen.close()
    for seed in range(17, 21):
        both.write(torch.randperm(num_rows, generator=generator)[: num_rows // 4], seed)
    wait_for(lambda: file.file_bytes <= most)  # space is freed in the background
    both.check(torch.arange(num_rows))
    counters = file.counters
    assert counters.num_rows_written == num_rows + 20 * (num_rows // 4) and counters.num_rows_cleaned > 0
    assert counters.written_bytes < 4.5 * counters.num_rows_written * record_bytes
    file.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_write_during_cleaning_is_kept(tmp_path: Path, kind: str) -> None:
    num_rows, width, num_rounds = 10, 5000, 250
    engine = DiskEngine(tmp_path, kind, queue_depth=1)  # cleaning waits for a queue entry while it holds a row
    file = RowFile(engine, "t", num_rows=num_rows, record_bytes=width, segment_bytes=SMALL)
    random = np.random.default_rng(1)
    there, here = (torch.zeros(num_rows, width, dtype=torch.uint8) for _ in range(2))
    file.write(torch.arange(num_rows), there)
    for seed in range(num_rounds):
        rows = torch.from_numpy(random.integers(0, num_rows, random.integers(1, 300)))
        records = records_of(len(rows), width, seed)
        file.write(rows, records)
        there.numpy()[rows.numpy()] = records.numpy()  # the last value of a repeated row wins
        file.read(torch.arange(num_rows), here).wait()
        assert torch.equal(here, there)
    assert file.counters.num_rows_cleaned > num_rounds
    file.close()


def test_parts_of_rows_that_were_written_at_random_are_read_in_few_large_requests(engine: DiskEngine) -> None:
    num_rows, width = 40_000, 260
    file = RowFile(engine, "t", num_rows=num_rows, record_bytes=width, segment_bytes=16 * SMALL, part_bytes=1 << 21)
    both = Both(file, InMemoryRowFile(num_rows, width))
    both.write(torch.randperm(num_rows, generator=torch.Generator().manual_seed(2)), 0)
    file.flush()
    both.freeze()
    before = file.counters
    for first in range(0, num_rows, file.part_rows):
        both.check_frozen(first, min(first + file.part_rows, num_rows))
    after = file.counters
    assert file.part_rows == 4096 and after.num_rows_read - before.num_rows_read == num_rows
    assert after.read_bytes - before.read_bytes < 1.1 * num_rows * width
    assert after.num_reads - before.num_reads < 2 * num_rows * width / (16 * SMALL)
    both.thaw()
    file.close()


def test_rows_that_were_never_written_take_no_room(engine: DiskEngine) -> None:
    file = RowFile(engine, "t", num_rows=1 << 31, record_bytes=68)
    rows = torch.tensor([0, 5, (1 << 31) - 1])
    file.write(rows, records_of(3, 68, 0))
    out = torch.full((4, 68), 7, dtype=torch.uint8)
    present = file.read(torch.tensor([5, 6, (1 << 31) - 1, 0]), out).wait()
    assert present.tolist() == [True, False, True, True]
    assert torch.equal(out[[3, 0, 2]], records_of(3, 68, 0)) and out[1].eq(7).all()
    assert file.file_bytes < 2e6 and file.num_bytes() < 12e6  # 8 bytes of each 4096 rows are 4 MB, twice
    file.close()


def test_reported_memory(engine: DiskEngine) -> None:
    file = RowFile(engine, "t", num_rows=1 << 20, record_bytes=16)
    empty = file.num_bytes()
    file.write(torch.arange(1 << 20), torch.zeros(1 << 20, 16, dtype=torch.uint8))
    file.flush()
    index = file.num_bytes() - empty
    assert 4 * (1 << 20) <= index < 4 * (1 << 20) * 1.02 + 300_000  # and one buffer
    frozen = file.snapshot()
    file.write(torch.arange(0, 1 << 20, 4096), torch.zeros(256, 16, dtype=torch.uint8))
    assert file.num_bytes() - empty > 2 * 4 * (1 << 20)  # each chunk was written to
    frozen.close()
    assert file.num_bytes() - empty < index * 1.2 + 600_000
    file.close()


def test_reads_are_limited(engine: DiskEngine) -> None:
    engine.max_reads_per_s = 2000
    file = RowFile(engine, "t", num_rows=100_000, record_bytes=1032)
    file.write(torch.arange(10_000), records_of(10_000, 1032, 0))
    file.flush()
    out = torch.zeros(200, 1032, dtype=torch.uint8)
    before = file.counters
    file.read(torch.arange(0, 10_000, 50), out).wait()
    after = file.counters
    assert after.num_reads - before.num_reads == 200
    assert after.wait_s - before.wait_s > 0.09  # 198 of them at the rate
    engine.max_reads_per_s = None
    file.close()


def test_crc32c_is_castagnolis() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    ones = (1 << 32) - 1
    assert core().crc32c(data, ones, True) ^ ones == 0xE3069283  # RFC 3720, and the usual check value
    longer = np.random.default_rng(0).integers(0, 256, 1040, np.uint8)
    for size in (0, 1, 7, 8, 9, 1040):
        assert core().crc32c(longer[:size], 5, True) == core().crc32c(longer[:size], 5, False)


@pytest.mark.parametrize(
    ("record_bytes", "most"), [(68, 1.16), (200, 1.07), (260, 1.07), (384, 1.07), (388, 1.07), (1032, 1.06)]
)
def test_few_rows_cross_blocks_and_little_space_is_unused(record_bytes: int, most: float) -> None:
    entry, group, entries, segment, in_segment, read = core().row_layout(record_bytes, 512, 256 << 10)
    assert entry == record_bytes + 8 and group % 512 == 0 and segment % 4096 == 0 and segment >= 256 << 10
    assert entries * entry <= group and in_segment == segment // group * entries
    assert segment / (in_segment * record_bytes) < most
    anywhere = 512 + entry - 1  # bytes of the blocks of an entry that begins anywhere
    assert read / in_segment < anywhere


def test_wrong_calls_are_named(engine: DiskEngine) -> None:
    file = RowFile(engine, "t", num_rows=10, record_bytes=8, owner="table 't', rows 0..9")
    out = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(MesetaError, match=r"table 't', rows 0..9: rows\[0\] is 10; the file has rows 0..9"):
        file.read(torch.tensor([10]), out)
    with pytest.raises(MesetaError, match=r"rows\[0\] is -1"):
        file.write(torch.tensor([-1]), out)
    with pytest.raises(MesetaError, match="there are 2 rows, but values of 1"):
        file.write(torch.tensor([0, 1]), out)
    with pytest.raises(MesetaError, match="values of a row have 6 bytes, but its record has 8"):
        file.write(torch.tensor([0]), out[:, :3].contiguous(), out[:, :3].contiguous())
    frozen = file.snapshot()
    with pytest.raises(MesetaError, match="not among the 10 rows of the snapshot"):
        frozen.read(10, out)
    file.close()
    file.close()
    with pytest.raises(MesetaError, match="is closed"):
        file.flush()
    with pytest.raises(MesetaError, match="split them into shards"):
        RowFile(engine, "t", num_rows=(1 << 31) + 1, record_bytes=8)
    with pytest.raises(MesetaError, match="split its columns into shards"):
        RowFile(engine, "t", num_rows=1, record_bytes=1 << 20)
    with pytest.raises(MesetaError, match="max_reads_per_s"):
        DiskEngine(engine.folder, max_reads_per_s=0)


def test_a_file_that_is_dropped_ends_as_one_that_is_closed(engine: DiskEngine) -> None:
    file = RowFile(engine, "t", num_rows=20_000, record_bytes=260, segment_bytes=SMALL)
    file.write(torch.arange(20_000), records_of(20_000, 260, 3))  # and some writes are still pending
    path = file.path
    del file
    assert not os.path.exists(path)


def test_a_read_outlives_its_caller(engine: DiskEngine) -> None:
    file = RowFile(engine, "t", num_rows=20_000, record_bytes=260)
    file.write(torch.arange(20_000), records_of(20_000, 260, 3))
    file.flush()
    for _ in range(5):
        file.read(torch.randperm(20_000), torch.zeros(20_000, 260, dtype=torch.uint8))  # and the arrays are deleted
    file.close()


@pytest.fixture(autouse=True)
def no_file_stays(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path.name for path in tmp_path.rglob("*.meseta-rows")] == []
