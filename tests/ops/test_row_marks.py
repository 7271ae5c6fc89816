"""Tests of row marks: they equal sets, and every implementation of an update sets them, in any order of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops import row_update as ops
from meseta.ops.row_marks import Consumer, RowMarks, num_words
from meseta.ops.row_marks.row_set import CHUNK_ROWS, RowSet
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, reference
from meseta.ops.row_update.call import ApplyCall, UpdateCall
from meseta.ops.row_update.staged import TouchedRows, stage_block_sums, update_with_stats
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError
from optim.specs import SPECS
from triton_cases import TYPES, check_marks, copied, update_case, updated

Actions = list[tuple[str, set[int], Consumer]]


@given(
    num_rows=st.sampled_from([1, 15, 16, 17, 300]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["all", "one", "range", "clear"]), st.sets(st.integers(0, 299)), st.sampled_from(Consumer)
        )
    ),
)
def test_marks_equal_sets(num_rows: int, actions: Actions) -> None:
    marks, sets = RowMarks(num_rows), {one: set[int]() for one in Consumer}
    for kind, numbers, consumer in actions:
        rows = sorted(number % num_rows for number in numbers)
        rows = sorted(set(rows))
        match kind:
            case "all":
                marks.add(torch.tensor(rows, dtype=torch.int64))
                for of in sets.values():
                    of.update(rows)
            case "one":
                marks.add(torch.tensor(rows, dtype=torch.int64), consumer)
                sets[consumer].update(rows)
            case "range" if rows:
                marks.add_range(rows[0], rows[-1] + 1)
                for of in sets.values():
                    of.update(range(rows[0], rows[-1] + 1))
            case "clear":
                marks.clear(consumer)
                sets[consumer].clear()
    for consumer, of in sets.items():
        assert marks.marked_rows(consumer).tolist() == sorted(of)


def test_many_rows_are_listed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meseta.ops.row_marks._CHUNK_WORDS", 7)
    rows = torch.from_numpy(np.unique(np.random.default_rng(0).integers(0, 1000, 400)))
    marks = RowMarks(1000)
    marks.add(rows, Consumer.SERVERS)
    assert torch.equal(marks.marked_rows(Consumer.SERVERS), rows) and not len(marks.marked_rows(Consumer.CHECKPOINTS))


def by_the_operator(call: UpdateCall) -> None:
    torch.ops.meseta.row_update(*(getattr(call, name) for name in UpdateCall.__dataclass_fields__))


def by_the_kernels(call: UpdateCall) -> None:
    from meseta.ops.row_update import triton

    triton.row_update(call)


@pytest.mark.parametrize("update", [by_the_operator, reference.row_update])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad", "lars"])
def test_the_core_and_the_reference(optimizer: str, dtype: torch.dtype, update: Callable[[UpdateCall], None]) -> None:
    call = update_case(make_row_optimizer(SPECS[optimizer]), 3, dims=(16, 40, 5), dtype=dtype)
    check_marks(copied(call, dtype=torch.float64) if dtype == torch.float64 else call, "cpu", update)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here: see tests/gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lanes beyond a row's columns divide nothing by nothing
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_kernels(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_marks(
        update_case(make_row_optimizer(SPECS["adagrad"]), 7, dims=(5, 20, 16), dtype=dtype), "cpu", by_the_kernels
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_have_the_same_bits_with_marks_and_without() -> None:
    call = update_case(make_row_optimizer(SPECS["adam"]), 3, dims=(16, 40))
    marked = replace(call, marks=[torch.zeros(num_words(len(table)), dtype=torch.int32) for table in call.tables])
    for marked_result, other in zip(updated(marked, "cpu"), updated(call, "cpu"), strict=True):
        assert torch.equal(marked_result, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stands_in", [False, True])
def test_the_last_stage_marks_and_none_before(
    dtype: torch.dtype, stands_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the operator and its replacement on a GPU."""
    if stands_in:
        plain: Any = lambda *arguments: reference.row_apply(ApplyCall(*arguments))  # noqa: E731
        monkeypatch.setattr("meseta.ops.row_update.staged._operator", plain)
    optimizer, marks, row_ids = make_row_optimizer(SPECS["rowwise_adagrad"]), RowMarks(90), torch.randperm(90)[:40]
    weight = torch.randn(40, 32, dtype=dtype)
    table = TableRows(weight, optimizer.init(weight), first_row=1000, row_ids=row_ids, marks=marks.words)
    slots = torch.tensor([0, 3, 17, 39])
    touched = TouchedRows(table, slots, torch.randn(4, 32, dtype=dtype), Hyper(0.1, 3, 32))
    stats = torch.cat([stage_block_sums(optimizer, 0, touched, touched.gradient.new_empty(0, 4)).sum(2)])
    update_with_stats(optimizer, touched, stats, torch.ones((), dtype=dtype))
    assert not len(marks.marked_rows(Consumer.CHECKPOINTS))
    update_with_stats(optimizer, touched, stats)
    for consumer in Consumer:
        assert torch.equal(marks.marked_rows(consumer), row_ids[slots].sort().values)


def test_threads_that_share_words_lose_none() -> None:
    """Rows are in slots of any order, so that every thread writes to all words."""
    num_rows, threads = 60_000, torch.get_num_threads()
    row_ids = torch.from_numpy(np.random.default_rng(5).permutation(num_rows))
    optimizer = make_row_optimizer(SPECS["sgd"])
    torch.set_num_threads(8)
    try:
        for turn in range(10):
            marks, weight = RowMarks(num_rows), torch.zeros(num_rows, 8)
            table = TableRows(weight, optimizer.init(weight), row_ids=row_ids, marks=marks.words)
            group = UpdateGroup(optimizer, (table,), (8,), (FeatureGradient(0, 0, 0),))
            slots = torch.arange(turn, num_rows)
            bags = Bags(slots, torch.arange(len(slots) + 1), len(slots))
            ops.row_update(group, 0.1, 1, bags, [torch.ones(len(slots), 8)])
            assert torch.equal(marks.marked_rows(Consumer.SERVERS), row_ids[turn:].sort().values)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_logged_rows_are_marked_when_the_log_is_full_or_read(num_threads: int) -> None:
    """Steps update few rows, as many rows as the log holds, and more."""
    num_rows, random, threads = 70_001, np.random.default_rng(6), torch.get_num_threads()
    optimizer, marks, weight = make_row_optimizer(SPECS["sgd"]), RowMarks(num_rows), torch.zeros(num_rows, 8)
    room = len(marks.words_and_log) - num_words(num_rows) - 1
    table = TableRows(weight, optimizer.init(weight), marks=marks.words_and_log)
    group = UpdateGroup(optimizer, (table,), (8,), (FeatureGradient(0, 0, 0),))
    sets = {consumer: np.zeros(num_rows, bool) for consumer in Consumer}
    torch.set_num_threads(num_threads)
    try:
        for turn, count in enumerate([900, 900, room, 300, room + 1, 2500, 2500, 700, 1, 2000]):
            ids = np.append(random.integers(0, num_rows, count - 1), num_rows - 1)
            bags = Bags(torch.from_numpy(ids), torch.arange(count + 1), count)
            ops.row_update(group, 0.1, turn + 1, bags, [torch.ones(count, 8)])
            for of in sets.values():
                of[ids] = True
            if turn in (1, 2, 3, 7):
                consumer = Consumer(turn % 2)
                assert np.array_equal(marks.marked_rows(consumer).numpy(), sets[consumer].nonzero()[0])
                marks.clear(consumer)
                sets[consumer][:] = False
        assert int(marks.words_and_log[num_words(num_rows)]) > 0, "no row is in the log"
        for consumer, of in sets.items():
            assert np.array_equal(marks.marked_rows(consumer).numpy(), of.nonzero()[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([torch.zeros(1, dtype=torch.int64)], "marks are torch.int64"),
        ([torch.zeros(1, dtype=torch.int32)], r"marks are torch.int32 \[1\]; pass contiguous int32 \[3\]"),
        ([torch.zeros(6, dtype=torch.int32)[::2]], "pass contiguous int32"),
        ([], "pass marks for each table, or for none"),
    ],
)
def test_marks_that_do_not_fit_are_named(marks: list[Tensor], message: str) -> None:
    call = update_case(make_row_optimizer(SPECS["sgd"]), 4, dims=(16,))
    table = torch.zeros(33, 16)
    with pytest.raises(MesetaError, match=message):
        by_the_operator(replace(call, tables=[table], marks=marks))


def test_a_row_outside_the_marks_is_named() -> None:
    """With rows in slots, only the marks define the number of rows."""
    call = update_case(make_row_optimizer(SPECS["sgd"]), 4, dims=(16,))
    row_ids = torch.full((len(call.tables[0]),), 16)
    with pytest.raises(MesetaError, match="row 16 is outside the marks of 16 rows"):
        by_the_operator(replace(call, row_ids=[row_ids], marks=[torch.zeros(1, dtype=torch.int32)]))


@given(
    num_rows=st.sampled_from([1, 7, 8, 300, CHUNK_ROWS, 2 * CHUNK_ROWS + 11]),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3),
    seed=st.integers(0, 99),
)
def test_a_row_set_equals_a_list_of_flags(num_rows: int, ranges: list[tuple[float, float]], seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, flags = RowSet(num_rows), np.zeros(num_rows, bool)
    former = rows.copy()
    for share in (0.01, 0.5):
        some = np.unique(random.integers(0, num_rows, int(share * num_rows)))
        rows.add(torch.from_numpy(some))
        flags[some] = True
        assert len(rows) == flags.sum()
    for bounds in ranges:
        first, stop = sorted(int(bound * num_rows) for bound in bounds)
        rows.add_range(first, stop)
        flags[first:stop] = True
    for bounds in ([0.0, 1.0], *ranges):
        first, stop = sorted(int(bound * num_rows) for bound in bounds)
        assert rows.count(first, stop) == flags[first:stop].sum()
        assert np.array_equal(rows.rows(first, stop).numpy(), flags[first:stop].nonzero()[0] + first)
    assert np.array_equal(rows.rows().numpy(), flags.nonzero()[0]) and len(former) == 0
    assert len(RowSet.all(num_rows)) == num_rows


def test_a_set_of_rows_is_listed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meseta.ops.row_marks.row_set.ROWS_PER_PART", 64)
    marks, rows = RowMarks(1000), torch.from_numpy(np.unique(np.random.default_rng(0).integers(0, 1000, 400)))
    members = RowSet(1000)
    members.add(rows)
    assert torch.equal(torch.cat(list(members.parts())), rows)
    marks.add_set(members, Consumer.CHECKPOINTS)
    assert torch.equal(marks.marked_rows(Consumer.CHECKPOINTS), rows) and not len(marks.marked_set(Consumer.SERVERS))
