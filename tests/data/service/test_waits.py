"""Tests of the causes of waits for rows, as shares of the time for which the consumer was blocked, by reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.service.tier import SlowFiles, running
from data.test_reader import NUM_ROWS, make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.dataset import part_files
from meseta.data.read import decode as decoding
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.rows import WindowTimer
from meseta.data.read.selection import RowSelection
from meseta.data.service.client import windows
from meseta.data.service.client.reader import ServedReader
from meseta.data.service.client.windows import attribute_wait
from meseta.data.service.messages import WindowTimings
from meseta.data.service.server import window_reader
from meseta.spec import MesetaError
from meseta.telemetry.span import NO_READER, RowWait, RowWaits

SECONDS = st.integers(0, 12)


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("waits") / "data", multi_valued=True)


# The rule


@given(waited=SECONDS, storage=SECONDS, decode=SECONDS, transform=SECONDS, ready=SECONDS)
def test_a_wait_is_shared_out_second_by_second(
    waited: int, storage: int, decode: int, transform: int, ready: int
) -> None:
    """Compares with a clock: for each second of a wait, whether the reader was decoding the window."""
    made = WindowTimings(storage_s=storage, decode_s=decode, transform_s=transform, buffered_s=ready)
    total = storage + decode + transform
    is_made_in = [-ready - total <= second < -ready for second in range(-waited, 0)]
    wait = attribute_wait(waited, made)
    assert wait.transfer_s == pytest.approx(waited - sum(is_made_in))
    assert wait.total_s == pytest.approx(waited) and wait.no_lease_s == 0
    for seconds, part in ((wait.storage_s, storage), (wait.decode_s, decode), (wait.transform_s, transform)):
        assert seconds * total == pytest.approx(sum(is_made_in) * part)


def test_waits_without_reader_times_count_as_network() -> None:
    assert attribute_wait(3.0, None) == RowWait(transfer_s=3.0)


def test_means_are_per_step_and_over_all_that_was_taken() -> None:
    waits = RowWaits()
    waits.add({"a": RowWait(storage_s=3.0, transfer_s=1.0), "b": RowWait(decode_s=4.0)}, 0.5)
    assert waits.pop_means(2) == {"a": RowWait(storage_s=0.75, transfer_s=0.25), "b": RowWait(decode_s=1.0)}
    assert waits.pop_means(2) == {}
    waits.add({"a": RowWait(storage_s=1.0)})
    assert waits.lifetime_means() == {"a": RowWait(storage_s=0.375, transfer_s=0.125), "b": RowWait(decode_s=0.5)}


# The causes


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **more)

    return slow


def read_all(
    reader: BatchReader, after_first: Callable[[], None] = lambda: None
) -> tuple[float, RowWait, dict[str, RowWait]]:
    """Return how long this function waited for batches, the total wait that the reader states, and its wait by reader.

    `after_first` runs between the first batch and the second.
    """
    waited_s, num_rows, batches = 0.0, 0, reader.epoch()
    while True:
        begin_s = time.perf_counter()
        batch = next(batches, None)
        waited_s += time.perf_counter() - begin_s
        if batch is None:
            assert num_rows == NUM_ROWS
            waits = reader.row_waits.pop_means(1)
            return waited_s, sum(waits.values(), RowWait()), waits
        if num_rows == 0:
            after_first()
        num_rows += batch.batch_size


SLOW: dict[str, tuple[Any, str, Callable[[float], Any], float]] = {
    "storage_s": (part_files, "io", SlowFiles, 0.04),
    "decode_s": (decoding, "check_values", partial(slowed, decoding.check_values), 0.15),
    "transfer_s": (window_reader, "to_record_batch", partial(slowed, window_reader.to_record_batch), 0.25),
}
"""Place, name and slow replacement of an object for each cause, with the least delay of a call in seconds."""


@pytest.mark.parametrize("cause", SLOW)
def test_what_is_slow_is_what_is_waited_for(cause: str, jagged: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ReaderOptions(batch_size=50, shuffle=True, window_rows=100, prefetch_batches=0)
    module, name, slow, least_s = SLOW[cause]
    with running({"click": jagged.dir}, 2) as tier:
        # On a busy machine all causes take longer. Each delay is twice the time of an epoch without delays.
        usual_s, _, _ = read_all(ServedReader(tier.service, "train", options))
        monkeypatch.setattr(module, name, slow(max(least_s, 2 * usual_s)))
        waited_s, wait, waits = read_all(ServedReader(tier.service, "train", options))
        assert set(waits) - {NO_READER} == {reader.url for reader in tier.readers}
    assert wait.total_s <= waited_s
    assert getattr(wait, cause) > 0.5 * waited_s > 0.03


def test_no_reader_is_a_cause_once_a_batch_is_asked_for(jagged: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "RETRY_DELAY_S", 0.1)
    with running({"click": jagged.dir}, 0) as tier:
        reader = ServedReader(tier.service, "train", ReaderOptions(batch_size=50))
        batches = reader.epoch()
        time.sleep(0.5)
        coming = threading.Timer(0.5, tier.add_reader)
        coming.start()
        begin_s = time.perf_counter()
        next(batches)
        waited_s = time.perf_counter() - begin_s
        coming.join()
        batches.close()
    waits = reader.row_waits.pop_means(1)
    assert 0.4 < waits[NO_READER].no_lease_s <= sum(waits.values(), RowWait()).total_s <= waited_s


def test_what_reading_ahead_hides_is_no_wait(jagged: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "io", SlowFiles())
    with running({"click": jagged.dir}, 1) as tier:
        options = ReaderOptions(batch_size=50, window_rows=37, prefetch_batches=0)
        _, seen, _ = read_all(ServedReader(tier.service, "train", options))
        [decoder] = tier.decoders
        num_before = decoder.num_rows

        def until_all_is_decoded() -> None:
            while decoder.num_rows < num_before + NUM_ROWS:
                time.sleep(0.01)

        ahead = replace(options, prefetch_batches=NUM_ROWS)
        _, hidden, _ = read_all(ServedReader(tier.service, "train", ahead), until_all_is_decoded)
    assert hidden.storage_s < 0.5 * seen.storage_s, "of the first batch there is always some"


def test_a_local_reader_has_no_waits(jagged: Dataset) -> None:
    _, _, waits = read_all(Reader(jagged, "train", ReaderOptions(batch_size=50)))
    assert waits == {}


def test_a_file_that_is_cut_short_is_named_as_before(tmp_path: Path) -> None:
    """Timed reads fail like others."""
    dataset = make_dataset(tmp_path / "data", multi_valued=False)
    files = decoding.SplitFiles(dataset, "train", RowSelection(dataset, condition=None, negative_keep=1.0, seed=0))
    times = WindowTimer()
    rows = files.read([0, 1], by_row=False, times=times)
    assert rows.label.size == 74 and times.storage_s > 0 and times.decode_s > 0 and times.transform_s == 0
    path = dataset.resolve_file(dataset.splits["train"].files[0].path)
    path.write_bytes(path.read_bytes()[:900])
    for timer in (None, WindowTimer()):
        with pytest.raises(MesetaError, match=f"{path.name}.*cannot be read"):
            files.read([3], by_row=False, times=timer)
