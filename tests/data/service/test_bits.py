"""Tests that batches and state of served readers are bitwise identical to those of a local Reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.service.tier import Tier, digest, running
from data.test_reader import NUM_ROWS, make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.read.order import epoch_order
from meseta.data.read.slicing import BatchSlicer
from meseta.data.service import dispatcher_client
from meseta.data.service.client.reader import ServedReader
from meseta.data.service.connection import Connection
from meseta.data.service.keys import TlsKeys
from meseta.data.service.server.window_reader import ReadServer
from sampling import fewer_examples


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("served") / "data", multi_valued=True)


@pytest.fixture(scope="module", params=[*(pytest.param(number, marks=pytest.mark.soak) for number in (1, 2)), 5])
def tier(request: pytest.FixtureRequest, jagged: Dataset) -> Iterator[Tier]:
    with running({"click": jagged.dir}, request.param) as tier:
        yield tier


@fewer_examples(5)
@given(
    share=st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]),
    batch_size=st.integers(1, 700),
    window_rows=st.integers(40, 700),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    last_batch=st.sampled_from(["keep", "drop", "pad"]),
    prefetch_batches=st.sampled_from([0, 1, 3]),
    condition=st.sampled_from([None, "d0 >= 100", "label == 1"]),
    negative_keep=st.sampled_from([1.0, 0.4]),
)
def test_batches_are_those_of_a_reader(
    tier: Tier, jagged: Dataset, share: tuple[int, int], condition: str | None, **options: Any
) -> None:
    asked, (rank, num_ranks) = ReaderOptions(filter=condition, **options), share
    local = Reader(jagged, "train", asked, rank=rank, num_ranks=num_ranks)
    served = ServedReader(tier.service, "train", asked, rank=rank, num_ranks=num_ranks)
    assert (served.num_rows, served.num_batches, served.excluded_rows) == (
        local.num_rows, local.num_batches, local.excluded_rows,
    )  # fmt: skip
    assert list(map(digest, served.epochs(2))) == list(map(digest, local.epochs(2)))
    assert served.get_state() == local.get_state()


def test_connections_outlive_an_epoch(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def connect(kind: str, url: str, keys: TlsKeys | None) -> Connection:
        made.append((kind, url))
        return Connection(kind, url, keys)

    monkeypatch.setattr(dispatcher_client, "Connection", connect)
    served = ServedReader(tier.service, "train", ReaderOptions(batch_size=64, window_rows=50))
    for _ in served.epochs(4):
        pass
    assert len(made) == len(set(made)) <= 1 + len(tier.readers) and ("dispatcher", tier.service.url) in made


@given(
    num_rows=st.integers(1, 200),
    batch_size=st.integers(1, 60),
    num_ranks=st.integers(1, 7),
    last_batch=st.sampled_from(["keep", "drop", "pad"]),
    data=st.data(),
)
def test_rows_of_a_rank_are_those_of_its_slices(
    num_rows: int, batch_size: int, num_ranks: int, last_batch: Any, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, num_rows - 1))
    first = data.draw(st.integers(0, num_rows))
    last = data.draw(st.integers(first, num_rows))
    takers = set()
    for rank in range(num_ranks):
        cut = BatchSlicer(
            num_rows=num_rows, batch_size=batch_size, last_batch=last_batch, rank=rank, num_ranks=num_ranks
        )
        rows: list[int] = []
        for number in range(cut.num_batches_from(begin)):
            slice_ = cut.slice_at(begin + number * batch_size)
            rows += range(slice_.first, slice_.last)
        assert cut.rows_between(begin, first, last).tolist() == [row for row in rows if first <= row < last]
        if any(first <= row < last for row in rows):
            takers.add(rank)
    ranks = cut.ranks_between(begin, first, last)
    assert (set(ranks), len(ranks)) == (takers, len(takers))


@given(
    num_rows=st.integers(1, 100_000),
    batch_size=st.integers(1, 2**53 - 1) | st.integers(1, 5000),
    num_ranks=st.integers(1, 1 << 20),
    last_batch=st.sampled_from(["keep", "drop", "pad"]),
    data=st.data(),
)
def test_ranks_of_a_window(
    num_rows: int, batch_size: int, num_ranks: int, last_batch: Any, data: st.DataObject
) -> None:
    """Compares with the rows of single ranks, including both ends of each range. Up to a million ranks exist."""
    begin = data.draw(st.integers(0, num_rows - 1))
    first = data.draw(st.integers(0, num_rows))
    last = data.draw(st.integers(first, num_rows))
    cut = BatchSlicer(num_rows=num_rows, batch_size=batch_size, last_batch=last_batch, rank=0, num_ranks=num_ranks)
    began_s = time.process_time()
    ranks = cut.ranks_between(begin, first, last)
    assert time.process_time() - began_s < 0.05
    drawn = data.draw(st.lists(st.integers(0, num_ranks - 1), max_size=20))
    ends = [rank for one in ranks.ranges for rank in (one.start - 1, one.start, one.stop - 1, one.stop)]
    for rank in {0, num_ranks - 1, *drawn, *(rank for rank in ends if 0 <= rank < num_ranks)}:
        assert (rank in ranks) == (replace(cut, rank=rank).num_rows_between(begin, first, last) > 0)


@pytest.mark.parametrize("begins", ["local", "served"])
def test_a_run_may_change_between_files_and_readers_in_the_middle(tier: Tier, jagged: Dataset, begins: str) -> None:
    options = ReaderOptions(batch_size=60, shuffle=True, seed=3, window_rows=100)

    def local(batch_size: int = 60) -> Reader:
        return Reader(jagged, "train", ReaderOptions(**{**vars(options), "batch_size": batch_size}))

    def served(batch_size: int = 60) -> ServedReader:
        return ServedReader(tier.service, "train", ReaderOptions(**{**vars(options), "batch_size": batch_size}))

    one, other = (local, served) if begins == "local" else (served, local)
    expected = [digest(batch) for batch in local().epochs(2)]
    first = one()
    digests = [digest(batch) for _, batch in zip(range(4), first.epochs(2), strict=False)]
    second = other()
    second.set_state(first.get_state())
    digests += [digest(batch) for batch in second.epochs(2)]
    assert digests == expected
    # With another batch size, whose batches begin inside the earlier ones.
    state = first.get_state()
    third, fourth = one(37), other(37)
    third.set_state(state)
    fourth.set_state(state)
    assert list(map(digest, third.epochs(2))) == list(map(digest, fourth.epochs(2)))
    assert NUM_ROWS > 4 * 60


def test_windows_of_the_next_epoch_are_asked_for_before_it_begins(jagged: Dataset) -> None:
    """No epoch begins with a wait, and no window is requested that will not be read."""
    options = ReaderOptions(batch_size=50, shuffle=True, window_rows=100, prefetch_batches=0)
    local = Reader(jagged, "train", options)
    num_windows = [len(epoch_order(local._files.group_rows, options, epoch)) for epoch in range(2)]
    with running({"click": jagged.dir}, 2) as tier:
        reader = ServedReader(tier.service, "train", options)
        batches = reader.epochs(2)
        for _ in range(reader.num_batches - 1):
            next(batches)
        deadline_s = time.monotonic() + 10
        while decoded(tier) <= num_windows[0]:
            assert time.monotonic() < deadline_s, "nothing of the next epoch is made"
            time.sleep(0.01)
        assert sum(1 for _ in batches) == reader.num_batches + 1
        assert decoded(tier) == sum(num_windows)
        abandoned = ServedReader(tier.service, "train", options).epochs(9)
        for _ in range(reader.num_batches):
            next(abandoned)
        abandoned.close()
        while any(server._reader.windows._entries and busy(server) for server in tier.readers):
            assert time.monotonic() < deadline_s + 10, "a reader still sends windows of a closed session"
            time.sleep(0.01)


def decoded(tier: Tier) -> int:
    return sum(server._reader.windows.num_decoded for server in tier.readers)


def busy(server: ReadServer) -> bool:
    return any(held.num_streams for held in list(server._reader.windows._entries.values()))
