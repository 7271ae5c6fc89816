"""Timers run for shards of any kind, and refuse shards that are too large."""

import pytest

from meseta.measure.calibrate.collectives import CollectiveTimer, ComputeTimer
from meseta.measure.calibrate.rank_timer import ShardTimer
from meseta.measure.calibrate.tasks import ShardingTask, TaskTable
from meseta.spec import MesetaError

TABLES = (
    TaskTable(num_rows=2000, dim=32, pooling_factor=2.5, distribution_index=0),
    TaskTable(num_rows=500, dim=8, pooling_factor=1.0, distribution_index=3),
)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_are_timed(optimizer: str, dtype: str) -> None:
    task = ShardingTask(seed=1, tables=TABLES, batch_size=64, dtype=dtype, optimizer=optimizer)
    # One table is sharded by rows, the other is whole. Column shards need an optimizer without sums over rows.
    columns = (0, 16) if optimizer == "sgd" else (0, 32)
    pieces = [(0, (0, 1000), columns), (0, (1000, 2000), columns), (1, (0, 500), (0, 8))]
    lookup_s, update_s, others = ShardTimer(1 << 22).time_shards(task.to_dict(), pieces, 1, 1)
    assert 0 < lookup_s < 1 and 0 < update_s < 1 and others >= 0


def test_more_than_the_memory_is_refused() -> None:
    with pytest.raises(MesetaError, match="reserved for them"):
        ShardTimer(1 << 16).time_shards(ShardingTask(seed=1, tables=TABLES).to_dict(), [(0, (0, 2000), (0, 32))], 1, 1)


def test_other_work_is_timed() -> None:
    timer = ComputeTimer()
    assert timer.time_matmul("bfloat16", [8, 8, 8], 1, 1) > 0
    assert timer.time_copy(1 << 12, 1, 1) > 0
    assert timer.time_bucketize(800, 1, 1) > 0
    alone = CollectiveTimer()
    assert alone.time_small_all_to_all(0, 1) > 0
    assert alone.time_collective("all_reduce", 64, 1) > 0 and alone.time_collective("all_to_all", 64, 1) > 0
