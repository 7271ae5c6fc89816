"""Tests of x + a * b in one pass: the same bits as torch.addcmul, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meseta.ops.common import add_product


def made(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(37, 19, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 0, 1), (0, 1, 1)], ids=["apart", "x_twice", "squared"])
def test_has_the_bits_of_torch(dtype: torch.dtype, places: tuple[int, int, int]) -> None:
    tensors = made(dtype)
    weights = torch.rand(37, 19, generator=torch.Generator().manual_seed(4)).to(dtype)
    outcomes = []
    for form in (torch.addcmul, add_product):
        out = form(*(tensors[place] for place in places))
        taken = [tensors[place] for place in sorted(set(places))]
        outcomes.append([out, *torch.autograd.grad(out, taken, weights)])
    for expected, actual in zip(*outcomes, strict=True):
        assert torch.equal(expected, actual) and expected.dtype == actual.dtype
