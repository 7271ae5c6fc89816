"""benchmarks/bench_dcnv2.py trains a small model anywhere, and counts the work of a step."""

from __future__ import annotations

import sys
from dataclasses import replace

import bench_dcnv2
import numpy as np
import pytest
import torch
from dcnv2.shape import MLPERF, NUM_DENSE, TINY, RowOptimizerName
from dcnv2.training import UniformBatches
from published_models import mlperf

H200_BYTES, H100_BYTES = 149_000_000_000, 85_000_000_000


def test_a_small_model_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_dcnv2, "NUM_WARM_UP_STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["bench_dcnv2.py", "--tiny", "--steps", "1", "--optimizer", "adagrad"])
    bench_dcnv2.main()
    printed = capsys.readouterr().out
    if not torch.cuda.is_available():
        assert "B 32 float32 rows of 16, 73 rows, adagrad" in printed
    for quantity in ("samples/s", "share of the limit", "table_update", "cross layers"):
        assert f"| {quantity} " in printed


def test_sizes_are_those_of_mlperf() -> None:
    assert sum(MLPERF.rows) == 204_184_588 and sum(MLPERF.ids) == 214 and MLPERF.num_inputs == 27 * 128
    work = MLPERF.work()
    row_bytes = sum(work[name].num_bytes for name in ("lookup", "sort of ids", "row update"))
    assert row_bytes / MLPERF.batch_size == pytest.approx(0.31e6, rel=0.1)
    assert MLPERF.table_bytes == pytest.approx(105.4e9, rel=0.001)


def test_products_are_those_of_the_planner() -> None:
    # The planner's model of MLPerf counts a gradient of the dense inputs, which no step computes.
    expected = mlperf().dense.flops_per_sample - 2 * NUM_DENSE * MLPERF.bottom_mlp[0]
    assert MLPERF.product_flops / MLPERF.batch_size == pytest.approx(expected)


def test_touched_rows_are_counted() -> None:
    shape = replace(TINY, batch_size=8)
    batches, tables = UniformBatches(shape), np.repeat(np.arange(3), 8 * np.array(shape.ids))
    counts = [
        len({*zip(tables.tolist(), batches.make(number).sparse.values.tolist(), strict=True)}) for number in range(200)
    ]
    assert shape.num_touched_rows == pytest.approx(np.mean(counts), rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "num_bytes", "dtype", "max_rows"),
    [
        ("rowwise_adagrad", H200_BYTES, "float32", 40_000_000),
        ("rowwise_adagrad", H100_BYTES, "bfloat16", 40_000_000),
        ("adagrad", H200_BYTES, "float32", 20_000_000),
        ("adagrad", H100_BYTES, "float32", 10_000_000),
    ],
)
def test_rows_fit_the_card(optimizer: RowOptimizerName, num_bytes: int, dtype: str, max_rows: int) -> None:
    shape = replace(MLPERF.with_max_rows(bench_dcnv2.MAX_ROWS[optimizer]), optimizer=optimizer)
    fitted = bench_dcnv2.fit(shape, num_bytes)
    assert (fitted.rows_dtype, max(fitted.rows)) == (dtype, max_rows)
    with pytest.raises(SystemExit, match="choose a smaller --batch-size"):
        bench_dcnv2.fit(shape, 10_000_000_000)


def test_every_batch_has_new_ids() -> None:
    batches = UniformBatches(TINY)
    first, again, second = batches.make(1), batches.make(1), batches.make(2)
    assert torch.equal(first.sparse.values, again.sparse.values) and torch.equal(first.dense, again.dense)
    assert not torch.equal(first.sparse.values, second.sparse.values)
    for rows, n, key in zip(TINY.rows, TINY.ids, first.sparse.keys, strict=True):
        assert (first.sparse[key].lengths == n).all() and first.sparse[key].values.max() < rows


def test_ids_of_a_smaller_batch_repeat_as_often() -> None:
    small = MLPERF.with_batch_size(512)
    expected = MLPERF.num_touched_rows / MLPERF.num_ids
    assert small.num_touched_rows / small.num_ids == pytest.approx(expected, rel=0.05)
    # The contributions of a block to these rows are added ahead.
    assert [rows for rows, n in zip(MLPERF.rows, MLPERF.ids, strict=True) if 256 * n / rows >= 16] == [3, 10, 4, 14]
    assert [rows for rows, n in zip(small.rows, small.ids, strict=True) if 512 * n / rows >= 16] == [1, 1, 1, 1]
