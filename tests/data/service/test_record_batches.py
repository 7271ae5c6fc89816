"""Tests that rows sent as Arrow record batches arrive unchanged, for any layout of their memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.test_reader import make_dataset
from meseta.data import Dataset
from meseta.data.read.rows import IdLists, Rows
from meseta.data.service.record_batches import ReceivedRows, record_batch_schema, to_record_batch


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("batches") / "data", multi_valued=True)


def make_rows(dataset: Dataset, num_rows: int, seed: int) -> Rows:
    draw = np.random.default_rng(seed)
    num_single = sum(not feature.multi_valued for feature in dataset.sparse)
    bags = []
    for feature in dataset.sparse:
        if feature.multi_valued:
            lengths = draw.integers(0, 4, num_rows)
            values = draw.integers(0, 2**31, lengths.sum())
            bags.append(IdLists(lengths, values, draw.random(values.size, np.float32) if feature.weighted else None))
    return Rows(
        draw.random(num_rows, np.float32),
        draw.random((num_rows, len(dataset.dense)), np.float32),
        draw.integers(0, 2**31, (num_single, num_rows)),
        tuple(bags),
    )


def through_ipc(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def backwards(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same columns in one buffer, the last column first."""
    last_first = through_ipc(batch.select(batch.schema.names[::-1]))
    return last_first.select(batch.schema.names)


@given(
    num_rows=st.integers(1, 50),
    num_columns=st.integers(0, 7),
    num_wide=st.integers(0, 7),
    has_lists=st.booleans(),
    carried=st.sampled_from([lambda batch: batch, through_ipc, backwards]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**31),
)
def test_rows_come_back(
    jagged: Dataset,
    num_rows: int,
    num_columns: int,
    num_wide: int,
    has_lists: bool,
    carried: Callable[[pa.RecordBatch], pa.RecordBatch],
    cut: tuple[float, float],
    seed: int,
) -> None:
    more = tuple(jagged.sparse[0].model_copy(update={"name": f"more_{number}"}) for number in range(num_columns))
    dataset = jagged.model_copy(update={"sparse": (*more, *jagged.sparse) if has_lists else more})
    rows = make_rows(dataset, num_rows, seed)
    schema = record_batch_schema(dataset, [f"more_{number}" for number in range(num_wide)])
    batch = carried(to_record_batch(rows, dataset, schema))
    start, stop = sorted(round(share * num_rows) for share in cut)
    sent = rows.take(slice(start, stop))
    received = ReceivedRows(batch, dataset, schema, "reader").take(start, stop)
    assert received.single_ids.dtype == np.int64 and received.single_ids.flags.owndata
    for expected_value, received_value in (
        (received.label, sent.label),
        (received.dense, sent.dense),
        (received.single_ids, sent.single_ids),
        *((getattr(a, name), getattr(b, name)) for a, b in zip(received.bags, sent.bags, strict=True)
          for name in ("lengths", "values", "weights")),
    ):  # fmt: skip
        assert (expected_value is None) == (received_value is None)
        if expected_value is not None:
            np.testing.assert_array_equal(expected_value, received_value)
