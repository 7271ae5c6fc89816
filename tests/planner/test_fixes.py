"""Tests of the changes suggested for a task that does not fit, and of their effect."""

import pickle
from dataclasses import replace

import pytest

from meseta.planner import DoesNotFitError, find_plan
from meseta.planner.cost.loads import shard_storage_bytes
from meseta.spec import TableSpec, Topology, Workload
from meseta.spec.constraints import Constraints
from planning_cases import random_workload


def table_bytes(table: TableSpec) -> int:
    return shard_storage_bytes(table, table.num_embeddings, table.embedding_dim)


def refused(workload: Workload, topology: Topology, constraints: Constraints | None = None) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        find_plan(workload, topology, None, constraints)
    return caught.value


def check_promises(error: DoesNotFitError) -> None:
    """Check that each change makes the task fit with the promised step time, and that the error survives pickling."""
    assert error.fixes
    received = pickle.loads(pickle.dumps(error))
    assert (str(received), received.certificate) == (str(error), error.certificate)
    assert [fix.description for fix in received.fixes] == [fix.description for fix in error.fixes]
    for fix in error.fixes:
        task = fix.task
        result = find_plan(task.workload, task.topology, task.cost_model, task.constraints)
        assert result.prediction.step_s == fix.step_s
        assert result.prediction.peak_bytes().max() <= task.topology.hbm_bytes
        assert f"{1e3 * fix.step_s:.3g} ms" in str(error) and fix.description in str(error)


def test_too_small_devices_are_named_with_bytes_and_changes_that_help() -> None:
    workload = random_workload(4, 3, batch_size=1024)
    total = sum(table_bytes(table) for table in workload.tables)
    error = refused(workload, Topology(devices_per_host=2, device="h100", hbm_bytes=int(0.45 * total)))
    assert "too much" in error.certificate and "'t1'" in error.certificate
    kinds = [fix.description.split()[0] for fix in error.fixes]
    assert kinds[0] == "store" and sorted(kinds[1:]) == ["give", "use"]  # changes without new machines are first
    check_promises(error)


def test_a_table_that_constraints_keep_whole_may_be_cut() -> None:
    workload = random_workload(3, 3, batch_size=1024)
    largest = max(workload.tables, key=table_bytes)
    topology = Topology(devices_per_host=4, device="h100", hbm_bytes=int(0.6 * table_bytes(largest)) + 5_000_000)
    constraints = Constraints.from_dict(
        {"tables": {"*": {"sharding": "table_wise", "dtypes": [largest.dtype]}}, "max_tables_per_rank": 3}
    )
    error = refused(workload, topology, constraints)
    assert f"{largest.name!r}" in error.certificate and "larger than the memory of a device" in error.certificate
    assert any("row_wise" in fix.description and largest.name in fix.description for fix in error.fixes)
    assert not any("float16" in fix.description for fix in error.fixes)
    check_promises(error)


def test_an_error_without_fixes_suggests_a_smaller_batch() -> None:
    workload = random_workload(2, 0, batch_size=1 << 20)
    with pytest.raises(ValueError, match="lower the batch size"):
        find_plan(workload, Topology(hbm_bytes=10_000_000))


def test_kept_tables_move_only_if_memory_runs_out(tmp_path) -> None:
    workload = random_workload(8, 11, batch_size=1024)
    topology = Topology(devices_per_host=4, device="h100", hbm_bytes=2_000_000_000)
    first = find_plan(workload, topology).plan
    first.save(tmp_path / "first.json")
    grown = replace(
        workload,
        tables=tuple(replace(t, num_embeddings=t.num_embeddings + 1000) for t in workload.tables[:2])
        + workload.tables[2:],
    )
    keep = Constraints.from_dict({"keep": str(tmp_path / "first.json")})
    second = find_plan(grown, topology, None, keep).plan
    second.check(grown.tables)
    for table in workload.tables[2:]:
        assert second[table.name].shards == first[table.name].shards
    for table in workload.tables[:2]:
        before, after = first[table.name], second[table.name]
        assert [s.ranks for s in after.shards] == [s.ranks for s in before.shards]
        assert [s.rows[0] for s in after.shards] == [s.rows[0] for s in before.shards]

    held = find_plan(grown, topology, None, keep).prediction.peak_bytes()
    tight = replace(topology, hbm_bytes=int(held.max()) - 1)
    third = find_plan(grown, tight, None, keep)
    third.plan.check(grown.tables)
    assert third.prediction.peak_bytes().max() <= tight.hbm_bytes
    stayed = [table.name for table in workload.tables if third.plan[table.name].shards == second[table.name].shards]
    assert len(stayed) >= len(workload.tables) - 2
