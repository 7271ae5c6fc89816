"""Random tasks are reproducible, stay in their ranges and have the reuse that they declare."""

import numpy as np
import pytest

from meseta.measure.calibrate.tasks import (
    DIMS,
    ID_DISTRIBUTIONS,
    ShardingTask,
    TaskTable,
    draw_bags,
    random_task,
    slice_bags,
)
from meseta.planner.cost.loads import WorkloadLoads


def test_a_seed_names_a_task() -> None:
    assert random_task(3) == random_task(3) != random_task(4)
    assert ShardingTask.from_dict(random_task(3).to_dict()) == random_task(3)
    first = random_task(0)
    assert len(first.tables) == 44 and first.tables[0].dim in DIMS
    again = draw_bags(first.tables[0], 256, [0, 0, 0])
    assert all((a == b).all() for a, b in zip(again, draw_bags(first.tables[0], 256, [0, 0, 0]), strict=True))


def test_tasks_stay_in_their_ranges() -> None:
    tasks = [random_task(seed) for seed in range(12)]
    tables = [table for task in tasks for table in task.tables]
    assert all(10 <= len(task.tables) <= 60 for task in tasks)
    assert {table.dim for table in tables} == set(DIMS)
    assert all(1e3 <= table.num_rows <= 1e7 and 1 <= table.pooling_factor <= 32 for table in tables)
    assert all(task.num_bytes <= 12e9 for task in tasks)
    assert 4.5 < np.log10([table.num_rows for table in tables]).mean() < 5.5  # log-uniform: 5


@pytest.mark.parametrize("distribution", range(len(ID_DISTRIBUTIONS)))
@pytest.mark.parametrize("num_rows", [2_000, 3_000_000])
def test_drawn_ids_have_the_distinct_rows_that_their_histogram_predicts(distribution: int, num_rows: int) -> None:
    table = TaskTable(num_rows=num_rows, dim=4, pooling_factor=7.3, distribution_index=distribution)
    ids, lengths = draw_bags(table, 2048, [1])
    assert lengths.sum() == len(ids) and set(lengths) == {7, 8}
    assert ids.min() >= 0 and ids.max() < num_rows
    loads = WorkloadLoads(ShardingTask(seed=0, tables=(table,)).workload())
    assert np.unique(ids).size == pytest.approx(loads.distinct_rows(loads.whole_tables(), 2048.0)[0], rel=0.05)


def test_ranges_share_a_batch() -> None:
    ids, lengths = np.array([5, 1, 9, 0, 7]), np.array([2, 0, 3])
    low, high = slice_bags(ids, lengths, (0, 6)), slice_bags(ids, lengths, (6, 10))
    assert [part.tolist() for part in low] == [[5, 1, 0], [2, 0, 1]]
    assert [part.tolist() for part in high] == [[3, 1], [0, 0, 2]]
