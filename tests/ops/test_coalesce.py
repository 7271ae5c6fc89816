"""Tests of coalesce: plain Python, the reference and the compiled core add in the same order, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.measure.threads import use_num_threads
from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce, reference
from meseta.spec import MesetaError

Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def by_hand(
    ids: Tensor, source: Tensor, block: Tensor, gradient: Tensor, scale: Tensor | None
) -> dict[int, np.ndarray]:
    """Sum one number at a time: left to right inside a block, then the block sums left to right."""
    g = gradient.numpy()
    blocks: dict[int, list[tuple[int, np.ndarray]]] = {}
    for i, row in enumerate(ids.tolist()):
        term = g[int(source[i])].copy()
        if scale is not None:
            term = (term * scale.numpy()[i].astype(g.dtype)).astype(g.dtype)
        sums = blocks.setdefault(row, [])
        if sums and sums[-1][0] == int(block[i]):
            sums[-1] = (sums[-1][0], sums[-1][1] + term)
        else:
            sums.append((int(block[i]), term))
    totals = {}
    for row, sums in blocks.items():
        total = sums[0][1]
        for _, block_sum in sums[1:]:
            total = total + block_sum
        totals[row] = total
    return totals


def problem(seed: int, nnz: int, dim: int, num_rows: int, dtype: torch.dtype, scaled: bool, strided: bool) -> Problem:
    """Draw contributions in sample order. The gradient may be a column range of a wider one."""
    random = np.random.default_rng(seed)
    num_samples = int(random.integers(1, 4 * BLOCK_SAMPLES))
    sample = np.sort(random.integers(0, num_samples, nnz))
    wide = torch.from_numpy(
        random.normal(size=(num_samples, dim + 5)) * 10.0 ** random.integers(-3, 4, (num_samples, 1))
    )
    gradient = wide.to(dtype)[:, 2 : 2 + dim]
    ids = torch.from_numpy(random.integers(0, num_rows, nnz))
    scale = torch.from_numpy(random.normal(size=nnz)).float() if scaled else None
    return (
        ids,
        torch.from_numpy(sample),
        torch.from_numpy(sample // BLOCK_SAMPLES),
        gradient if strided else gradient.contiguous(),
        scale,
    )


problems = st.builds(
    problem,
    seed=st.integers(0, 2**32),
    nnz=st.integers(1, 400),
    dim=st.integers(1, 40),
    num_rows=st.sampled_from([1, 2, 10, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scaled=st.booleans(),
    strided=st.booleans(),
)


@given(given_problem=problems)
def test_same_bits_as_the_contract_and_the_reference(given_problem: Problem) -> None:
    rows, sums = coalesce(*given_problem)
    expected = by_hand(*given_problem)
    assert rows.tolist() == sorted(expected)
    assert sums.dtype == given_problem[3].dtype
    for row, total in zip(rows.tolist(), sums, strict=True):
        assert np.array_equal(total.numpy(), expected[row])
    reference_rows, reference_sums = reference.coalesce(*given_problem)
    assert torch.equal(rows, reference_rows) and torch.equal(sums, reference_sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [False, True])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, scaled: bool) -> None:
    given_problem = problem(5, 30_000, 24, 500, dtype, scaled, True)  # enough ids for the core to use its threads
    first = reference.coalesce(*given_problem)
    for count in (1, 2, 3, 4):
        with use_num_threads(count):
            rows, sums = coalesce(*given_problem)
        assert torch.equal(rows, first[0]) and torch.equal(sums, first[1])


def test_sums_are_right() -> None:
    ids, source, block, gradient, scale = problem(9, 5000, 12, 300, torch.float64, True, False)
    assert scale is not None
    expected = np.zeros((300, 12))
    np.add.at(expected, ids.numpy(), gradient.numpy()[source.numpy()] * scale.numpy()[:, None].astype(np.float64))
    rows, sums = coalesce(ids, source, block, gradient, scale)
    np.testing.assert_allclose(sums.numpy(), expected[rows.numpy()], rtol=1e-12, atol=1e-12)
    rows32, sums32 = coalesce(ids, source, block, gradient.float(), scale)
    assert torch.equal(rows32, rows)
    np.testing.assert_allclose(sums32.numpy(), sums.numpy(), rtol=1e-4, atol=1e-2)


def test_blocks_decide_the_order_of_addition() -> None:
    # 1e8 + 1 is 1e8 in float32, so 1 + 1 survives only in a separate block.
    gradient = torch.tensor([[1e8], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0]])
    ids, source = torch.zeros(9, dtype=torch.int64), torch.arange(9)
    one_block = coalesce(ids, source, torch.zeros(9, dtype=torch.int64), gradient)[1]
    two_blocks = coalesce(ids, source, torch.tensor([0, *[1] * 8]), gradient)[1]
    assert one_block.item() == 1e8 and two_blocks.item() == 1e8 + 8


def test_products_are_rounded_before_they_are_added() -> None:
    # (1 + 2^-12)^2 needs 25 bits; a fused multiply-add would keep the last one.
    x = 1 + 2.0**-12
    gradient, scale = torch.full((2, 40), x), torch.full((2,), x)
    gradient[0] = -1.0
    scale[0] = 1.0
    zeros = torch.zeros(2, dtype=torch.int64)
    _, sums = coalesce(zeros, torch.arange(2), zeros, gradient, scale)
    assert torch.equal(sums, torch.full((1, 40), np.float32(x) * np.float32(x) - np.float32(1)))


def test_no_ids() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    rows, sums = coalesce(empty, empty, empty, torch.zeros(0, 5))
    assert rows.shape == (0,) and sums.shape == (0, 5)


def test_expanded_gradients_and_int32_ids() -> None:
    # `out.sum().backward()` gives a gradient whose strides are 0.
    gradient = torch.ones(1, 1).expand(4, 3)
    ids = torch.tensor([2, 0, 2, 2], dtype=torch.int32)
    rows, sums = coalesce(ids, torch.arange(4), torch.zeros(4, dtype=torch.int64), gradient)
    assert rows.tolist() == [0, 2] and sums.tolist() == [[1.0] * 3, [3.0] * 3]


@given(seed=st.integers(0, 2**32), nnz=st.integers(1, 60), scaled=st.booleans())
def test_rows_anywhere_in_64_bits(seed: int, nnz: int, scaled: bool) -> None:
    # Row and position do not fit one word here, and differences of rows pass 2^63.
    _, source, block, gradient, scale = problem(seed, nnz, 5, 9, torch.float32, scaled, False)
    random = np.random.default_rng(seed)
    rows = random.integers(-(2**63), 2**63 - 1, 9)
    ids = torch.from_numpy(rows[random.integers(0, 9, nnz)])
    got, sums = coalesce(ids, source, block, gradient, scale)
    expected = by_hand(ids, source, block, gradient, scale)
    assert got.tolist() == sorted(expected)
    assert all(np.array_equal(total.numpy(), expected[row]) for row, total in zip(got.tolist(), sums, strict=True))


@pytest.mark.parametrize(("source", "message"), [([0, 3], "source 3 is outside 0..2"), ([-1, 0], "source -1")])
def test_sources_outside_the_gradient_are_refused(source: list[int], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(MesetaError, match=message):
        coalesce(zeros, torch.tensor(source), zeros, torch.zeros(3, 4))


def test_tensors_of_other_lengths_are_refused() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(MesetaError, match="the same length, got 2, 1 and 2"):
        torch.ops.meseta.coalesce(zeros, zeros[:1], zeros, torch.zeros(3, 4), None)


@pytest.mark.parametrize("scaled", [False, True])
def test_operator_is_registered_as_torch_wants(scaled: bool) -> None:
    torch.library.opcheck(torch.ops.meseta.coalesce.default, problem(1, 50, 5, 9, torch.float32, scaled, False))
