"""Tests of the compiled product against integers in any memory layout, and of its errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import each_core
from meseta.ops import product as operator
from meseta.ops.common import softmax
from meseta.ops.product import batched_product, product
from meseta.spec import MesetaError

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = st.one_of(st.integers(1, 5), st.integers(1, 300))
ORDERS = list(itertools.permutations(range(3)))


def small_integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `x` with another order of dimensions in memory."""
    return x.permute(order).contiguous().permute(*(order.index(i) for i in range(3)))


@given(st.integers(1, 3), SIZES, SIZES, SIZES, st.booleans(), st.sampled_from(ORDERS), st.sampled_from(ORDERS))
@example(1, 1, 9000, 2500, True, (0, 1, 2), (0, 1, 2))
@example(1, 97, 5000, 129, False, (0, 1, 2), (0, 2, 1))
def test_products_of_small_integers_are_exact(
    items: int, rows: int, terms: int, columns: int, with_bias: bool, order: tuple[int, ...], other: tuple[int, ...]
) -> None:
    a, b = laid(small_integers(items, rows, terms), order), laid(small_integers(items, terms, columns), other)
    bias = small_integers(columns) if with_bias else None
    expected = (a.double() @ b.double()).long() + (0 if bias is None else bias)
    for dtype in DTYPES:
        with pytest.MonkeyPatch.context() as patch:
            for _ in each_core(operator, patch):
                out = torch.ops.meseta.product(a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype))
                assert out.dtype == dtype and torch.equal(out, expected.to(dtype))


@pytest.mark.skipif(not operator._onednn_has_kernels(), reason="oneDNN has no kernels for this processor")
def test_libraries_are_given_no_part_of_a_wider_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN has no kernel for column slices: a layer of 64,000 inputs took minutes."""
    linear, dense = torch.ops.mkldnn._linear_pointwise, []

    def watched(a: Tensor, weight: Tensor, *rest: Any) -> Any:
        dense.append(a.is_contiguous() and (weight.is_contiguous() or weight.t().is_contiguous()))
        return linear(a, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    a, weight = small_integers(4, 40_000).float(), small_integers(3, 40_000).float()
    for b in (weight.t(), weight.t().contiguous(), torch.cat([weight, weight]).t()[:, :3]):
        torch.testing.assert_close(product(a, b), a @ b, rtol=0, atol=0)
    product(a[:, :100], weight.t()[:100])
    assert len(dense) == 10 and all(dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 20_000, 3), (5, 40_000, 2), (4, 0, 3), (0, 4, 3), (3, 4, 0)])
def test_any_road_to_a_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, terms, columns = shape
    a, b, bias = small_integers(rows, terms), small_integers(terms, columns), small_integers(columns)
    expected = ((a[:, :, None] * b).sum(1) + bias).to(dtype)
    out = product(a.to(dtype), b.to(dtype), bias.to(dtype))
    # A library may round bfloat16 twice where a bias is added.
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("items", [2, 80])
def test_gradients_of_batched_products_and_softmax(items: int) -> None:
    a, b = torch.randn(items, 2, 3).double().requires_grad_(), torch.randn(items, 3, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: softmax(batched_product(a, b)), (a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_operator(dtype: torch.dtype) -> None:
    arguments: list[Any] = [torch.randn(shape).to(dtype) for shape in ((2, 5, 3), (2, 3, 4), (4,))]
    torch.library.opcheck(torch.ops.meseta.product.default, tuple(arguments))
    torch.library.opcheck(torch.ops.meseta.product.default, (*arguments[:2], None))


@pytest.mark.parametrize(
    ("a", "b", "bias"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), None),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), None),
        (torch.zeros(1, 2, 3), torch.zeros(2, 3, 2), None),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), torch.zeros(3)),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2).double(), None),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), torch.zeros(2).double()),
    ],
)
def test_mismatched_arguments_are_named(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(MesetaError, match=r"product: .*; pass"):
        torch.ops.meseta.product(a, b, bias)
