"""Times of samples in batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import timed_log
from data.click_log import read_split
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.spec import MesetaError
from small_run import spoil


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    timed_log.write(tmp_path, timed_log.make_rows(), num_files=2)
    return timed_log.run(tmp_path, test_fraction=0.2)


@pytest.mark.parametrize("last_batch", ["keep", "pad"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_have_the_times_of_their_rows(dataset: Dataset, shuffle: bool, last_batch: str) -> None:
    table = read_split(dataset.dir, "train")
    times = dict(zip(table["row"].to_pylist(), table["ts"].to_pylist(), strict=True))
    options = ReaderOptions(batch_size=90, shuffle=shuffle, window_rows=100, last_batch=last_batch)  # type: ignore[arg-type]
    num_rows = 0
    for rank in range(2):
        for batch in Reader(dataset.with_times(), "train", options, rank=rank, num_ranks=2).epoch():
            num_real = batch.batch_size - batch.num_padding
            assert batch.time is not None
            assert len(batch.time) == batch.batch_size
            assert batch.time[:num_real].tolist() == [times[row] for row in batch.dense[:num_real, 0].tolist()]
            num_rows += num_real
    assert num_rows == table.num_rows


def test_times_are_read_on_request_only(dataset: Dataset) -> None:
    options = ReaderOptions(batch_size=90)
    assert all(batch.time is None for batch in Reader(dataset, "train", options).epoch())
    without = dataset.model_copy(update={"time": None})
    assert without.with_times() is without
    assert dataset.with_times().to_dict() == dataset.to_dict()


def test_a_missing_time_is_nan(dataset: Dataset) -> None:
    spoil(dataset.dir, "train", "ts", 3, None)
    [batch] = Reader(dataset.with_times(), "train", ReaderOptions(batch_size=1000)).epoch()
    assert batch.time is not None
    assert np.flatnonzero(batch.time.isnan()).tolist() == [3]


def test_times_that_are_no_numbers(dataset: Dataset) -> None:
    path = sorted((dataset.dir / "train").glob("*.parquet"))[0]
    table = pq.read_table(path)
    place = table.schema.get_field_index("ts")
    pq.write_table(table.set_column(place, "ts", pa.array(["noon"] * len(table))), path)
    Reader(dataset, "train", ReaderOptions(batch_size=90))
    with pytest.raises(MesetaError, match="column 'ts' must hold numbers, got string"):
        Reader(dataset.with_times(), "train", ReaderOptions(batch_size=90))
