"""Tests of the pooled lookup against its reference, numpy and torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from instruction_sets import each_core
from meseta.ops import pooled_lookup as package
from meseta.ops.pooled_lookup import pooled_lookup, reference
from meseta.spec import MesetaError

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
Problem = tuple[list[Tensor], Tensor, Tensor, Tensor | None, list[bool], list[bool]]
"""Arguments of pooled_lookup."""


def problem(
    seed: int,
    num_samples: int,
    dims: Sequence[int],
    dtype: torch.dtype = torch.float32,
    weighted: Sequence[bool] = (),
    mean: Sequence[bool] = (),
    integers: torch.dtype = torch.int64,
) -> Problem:
    """Return a problem in which about half of the bags are empty and some tables have one row."""
    random = np.random.default_rng(seed)
    tables, lengths, ids = [], [], []
    for dim in dims:
        rows = int(random.integers(1, 30)) if random.random() < 0.8 else 1
        tables.append(torch.from_numpy(random.normal(size=(rows, dim))).to(dtype))
        length = random.integers(0, 7, num_samples) * random.integers(0, 2, num_samples)
        lengths.append(length)
        ids.append(random.integers(0, rows, length.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64))
    values = torch.from_numpy(np.concatenate(ids)).to(integers)
    weights = torch.from_numpy(random.normal(size=values.numel())).float() if any(weighted) else None
    return tables, values, offsets, weights, list(weighted), list(mean)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dims = draw(st.lists(st.one_of(st.integers(1, 48), st.integers(49, 300)), min_size=1, max_size=4))
    flags = st.lists(st.booleans(), min_size=len(dims), max_size=len(dims))
    return problem(
        draw(st.integers(0, 2**32)),
        draw(st.integers(0, 9)),
        dims,
        draw(st.sampled_from(TYPES)),
        draw(flags),
        draw(flags),
        draw(st.sampled_from([torch.int64, torch.int32])),
    )


def by_hand(given_problem: Problem) -> Tensor:
    """Return float64 sums of numpy."""
    tables, ids, offsets, weights, weighted, mean = given_problem
    num_samples = (offsets.numel() - 1) // len(tables)
    pooled = []
    for f, table in enumerate(tables):
        out = np.zeros((num_samples, table.shape[1]))
        for b in range(num_samples):
            start, stop = offsets[f * num_samples + b : f * num_samples + b + 2].tolist()
            for i in range(start, stop):
                factor = float(weights[i]) if weights is not None and weighted[f] else 1.0
                out[b] += factor * table[int(ids[i])].double().numpy()
            if mean and mean[f] and stop > start:
                out[b] /= stop - start
        pooled.append(out)
    return torch.from_numpy(np.concatenate(pooled, axis=1))


@given(given_problem=problems())
def test_equals_reference_and_numpy(given_problem: Problem) -> None:
    got, plain, exact = pooled_lookup(*given_problem), reference.pooled_lookup(*given_problem), by_hand(given_problem)
    dtype = torch.float64 if given_problem[0][0].dtype == torch.float64 else torch.float32
    assert got.shape == plain.shape == exact.shape and got.dtype == plain.dtype == dtype
    if not got.numel():
        return
    # The kernel may err at most twice as much as the reference in the same precision, plus one unit in the last place.
    ulp = torch.finfo(got.dtype).eps * float(exact.abs().max())
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + ulp


@given(given_problem=problems())
def test_has_the_bits_of_the_reference(given_problem: Problem) -> None:
    assert torch.equal(pooled_lookup(*given_problem), reference.pooled_lookup(*given_problem))


@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(17, 150),
    dtype=st.sampled_from(TYPES),
    weighted=st.booleans(),
    mean=st.booleans(),
)
def test_columns_of_a_shard_have_the_bits_of_the_whole(
    seed: int, dim: int, dtype: torch.dtype, weighted: bool, mean: bool
) -> None:
    # Column shards start at multiples of 16; the last one may have any width.
    tables, *rest = problem(seed, 8, [dim], dtype, [weighted], [mean])
    whole = pooled_lookup(tables, *rest)
    for start in range(0, dim, 16):
        got = pooled_lookup([tables[0][:, start : start + 16].contiguous()], *rest)
        assert torch.equal(got, whole[:, start : start + 16])


@given(seed=st.integers(0, 2**32), dims=st.lists(st.sampled_from([1, 16, 33, 64]), min_size=2, max_size=4))
def test_a_permuted_batch_gives_the_permuted_lookups(seed: int, dims: list[int]) -> None:
    tables, ids, offsets, weights, weighted, mean = problem(seed, 8, dims, weighted=[True] * len(dims))
    assert weights is not None
    order = np.random.default_rng(seed).permutation(8)
    bags = [(f * 8 + b) for f in range(len(dims)) for b in order]
    at = torch.cat([torch.arange(int(offsets[bag]), int(offsets[bag + 1])) for bag in bags])
    lengths = offsets.diff()[bags]
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    got = pooled_lookup(tables, ids[at], moved, weights[at], weighted, mean)
    assert torch.equal(got, pooled_lookup(tables, ids, offsets, weights, weighted, mean)[order])


@pytest.mark.parametrize(("weighted", "mode"), [(False, "sum"), (True, "sum"), (False, "mean")])
def test_equals_nn_embedding_bag(weighted: bool, mode: str) -> None:
    tables, ids, offsets, weights, *_ = problem(1, 12, [20], torch.float64, [weighted])
    bag = nn.EmbeddingBag.from_pretrained(tables[0], mode=mode, include_last_offset=True)
    expected = bag(ids, offsets, weights.double() if weights is not None else None)
    got = pooled_lookup(tables, ids, offsets, weights, [weighted], [mode == "mean"])
    torch.testing.assert_close(got, expected)


def test_tables_of_more_than_two_billion_elements() -> None:
    table = torch.from_numpy(np.zeros((2**31 + 8, 1), dtype=np.float16))  # unwritten pages take no memory
    table[-1], table[0] = 3.0, 1.0
    got = pooled_lookup([table], torch.tensor([2**31 + 7, 0, 7]), torch.tensor([0, 2, 3]))
    assert got.tolist() == [[4.0], [0.0]]


def test_weights_of_other_features_are_not_read() -> None:
    tables = [torch.ones(2, 1), torch.ones(2, 1)]
    ids, offsets = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    weights = torch.tensor([torch.nan, 3.0])
    got = pooled_lookup(tables, ids, offsets, weights, [False, True])
    assert got.tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_samples_and_only_empty_bags(dtype: torch.dtype) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    tables = [torch.ones(2, 3, dtype=dtype), torch.ones(4, 5, dtype=dtype)]
    for mean in ([], [True, True]):
        assert pooled_lookup(tables, empty, torch.zeros(1, dtype=torch.int64), mean=mean).shape == (0, 8)
        assert not pooled_lookup(tables, empty, torch.zeros(5, dtype=torch.int64), mean=mean).any()


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    large = problem(3, 3000, [16, 33, 300, 64], dtype, [True, False, True, False], [False, True, False, False])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = pooled_lookup(*large)
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(pooled_lookup(*large), one)
    finally:
        torch.set_num_threads(before)


def test_all_instruction_sets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = set()
    for _ in each_core(package, monkeypatch):
        outcome = []
        for dtype in TYPES[:3]:
            for seed, dims in enumerate([[16, 64, 1], [33, 128], [300, 20]]):
                flags = [seed % 2 == 0] * len(dims), [seed % 2 == 1] * len(dims)
                outcome.append(pooled_lookup(*problem(seed, 50, dims, dtype, *flags)).numpy().tobytes())
        outcomes.add(b"".join(outcome))
    assert len(outcomes) == 1


HOSTILE_OFFSETS = [
    [0, 1, -1, 3],
    [0, 2, 1, 3],
    [-1, 0, 1, 2],
    [0, 1, 2, 4],
    [0, 2**62, 2**62, 3],
    [-(2**63), 0, 1, 2**63 - 1],
    [3, 2, 1, 0],
]


@pytest.mark.parametrize("offsets", HOSTILE_OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_offsets_that_fall_or_leave_the_ids_are_refused(offsets: list[int], dtype: torch.dtype) -> None:
    with pytest.raises(MesetaError, match=r"pooled_lookup: offsets\[\d\] is .*must be in 0\.\.3"):
        pooled_lookup([torch.ones(5, 4, dtype=dtype)], torch.tensor([0, 1, 2]), torch.tensor(offsets))


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, 2**40, -(2**63)])
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_an_id_outside_its_table_is_named(bad: int, dtype: torch.dtype) -> None:
    tables = [torch.ones(9, 4, dtype=dtype), torch.ones(5, 20, dtype=dtype)]
    types = [torch.int64] if abs(bad) >= 2**31 else [torch.int64, torch.int32]
    for integers in types:
        ids = torch.tensor([8, 0, 4, bad, 1]).to(integers)
        with pytest.raises(MesetaError, match=rf"id {bad} of feature 1, sample 1, is outside 0\.\.4"):
            pooled_lookup(tables, ids, torch.tensor([0, 1, 2, 3, 5]))


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 3), max_size=6),
    offsets=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 6), min_size=1, max_size=5),
)
def test_hostile_input_is_an_error_or_a_sum(ids: list[int], offsets: list[int]) -> None:
    table = torch.ones(3, 20)
    values, bounds = torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64)
    try:
        got = pooled_lookup([table], values, bounds)
    except MesetaError:
        return
    assert torch.equal(got, bounds.diff()[:, None].expand(-1, 20).float())


def test_tensors_that_do_not_fit_are_refused() -> None:
    ids, offsets, table = torch.tensor([0]), torch.tensor([0, 1, 1]), torch.ones(1, 4)
    with pytest.raises(MesetaError, match="no table"):
        pooled_lookup([], ids, offsets)
    with pytest.raises(MesetaError, match="3 offsets for 3 features"):
        pooled_lookup([table] * 3, ids, offsets)
    operator = torch.ops.meseta.pooled_lookup  # the tests' shape checks come before the function's own
    for weights in (torch.ones(2), torch.ones(1, 1)):
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(MesetaError, match=r"weights \[.*\] for ids \[1\]"):
                operator([table.to(dtype)] * 2, ids, offsets, weights, [1, 1])
    with pytest.raises(MesetaError, match=r"rows are torch\.int64"):
        operator([table.long(), table.long()], ids, offsets, None, [0, 0])
    with pytest.raises(MesetaError, match=r"ids are torch\.float32"):
        operator([table, table], ids.float(), offsets, None, [0, 0])
    for other in (table.half(), torch.ones(4), torch.ones(4, 2).T):
        with pytest.raises(MesetaError, match="table 1 is"):
            pooled_lookup([table, other], ids, offsets)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    tables, ids, offsets, weights, weighted, mean = problem(2, 5, [16, 33], dtype, [True, False], [False, True])
    flags = [int(w) + 2 * int(m) for w, m in zip(weighted, mean, strict=True)]
    torch.library.opcheck(torch.ops.meseta.pooled_lookup.default, (tables, ids, offsets, weights, flags))


class Model(nn.Module):
    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.table, self.other = (nn.Buffer(table) for table in tables)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        pooled: Any = torch.ops.meseta.pooled_lookup([self.table, self.other], ids, offsets, None, [0, 2])
        return pooled.relu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compile_and_export(dtype: torch.dtype) -> None:
    tables, ids, offsets, *_ = problem(4, 6, [16, 5], dtype)
    model = Model(tables)
    expected = pooled_lookup(tables, ids, offsets, mean=[False, True]).relu()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(ids, offsets), expected)
    exported = torch.export.export(model, (ids, offsets)).module()
    assert torch.equal(exported(ids, offsets), expected)
