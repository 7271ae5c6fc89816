"""Tests of stacked linear layers against float64, plain torch, other numbers of threads and other builds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import each_core
from meseta.ops import mlp as operator
from meseta.ops.mlp import mlp, reference
from meseta.spec import MesetaError

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def problem(batch: int, widths: list[int], bias: bool = True) -> tuple[Tensor, list[Tensor], list[Any]]:
    random = np.random.default_rng([batch, *widths])
    weights = [torch.from_numpy(random.normal(size=(n, m))).float() / max(m, 1) ** 0.5 for m, n in pairwise(widths)]
    biases = [torch.from_numpy(random.normal(size=n)).float() if bias else None for n in widths[1:]]
    return torch.from_numpy(random.normal(size=(batch, widths[0]))).float(), weights, biases


def run(
    call: Any, given_problem: Any, dtype: torch.dtype, parameter_dtype: torch.dtype, relu_last: bool
) -> list[Tensor]:
    """Return the result and all gradients, the one of x first."""
    x, weights, biases = given_problem
    x = x.to(dtype).requires_grad_()
    weights = [weight.to(parameter_dtype).requires_grad_() for weight in weights]
    biases = [None if bias is None else bias.to(parameter_dtype).requires_grad_() for bias in biases]
    out = call(x, weights, biases, relu_last=relu_last)
    upper = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    out.backward(upper.to(out.dtype))
    return [out.detach(), *(t.grad for t in (x, *weights, *biases) if t is not None)]


@given(
    st.integers(1, 600),
    st.lists(st.integers(1, 70), min_size=2, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([F32, BF16]),
)
@example(300, [13, 512, 1], True, False, F32)
def test_error_is_at_most_twice_that_of_plain_torch(
    batch: int, widths: list[int], bias: bool, relu_last: bool, dtype: torch.dtype
) -> None:
    x, weights, biases = problem(batch, widths, bias)
    # A value close to a kink may fall to either side of it.
    given_problem = x.to(dtype).float(), weights, biases
    exact = run(reference.mlp, given_problem, F64, F64, relu_last)
    plain = run(reference.mlp, given_problem, dtype, F32, relu_last)
    computed = run(mlp, given_problem, dtype, F32, relu_last)
    for a, b, e in zip(computed, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = float(e.abs().max())
        errors = [float((value.double() - e).norm()) for value in (a, b)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps * scale * e.numel() ** 0.5


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (256, 16), (257, 33), (700, 40), (1000, 1)])
@pytest.mark.parametrize("relu", [False, True])
def test_bias_gradients_are_sums_of_blocks_of_256(
    shape: tuple[int, int], relu: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(shape[0])
    gradient = torch.randn(shape, generator=random).to(dtype)
    output = torch.randn(shape, generator=random).relu().to(dtype) if relu else None
    masked = gradient if output is None else gradient * (output > 0)
    expected = np.zeros(shape[1], np.float32)
    for block in np.split(masked.float().numpy(), range(256, shape[0], 256)):
        total = np.zeros(shape[1], np.float32)
        for row in block:
            total = total + row
        expected = expected + total
    for _ in each_core(operator, monkeypatch):
        for num_threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
            changed = gradient.clone()
            transposed, bias_gradient = operator.relu_backward(changed, output, True)
            assert torch.equal(changed, masked)
            assert torch.equal(transposed, masked.t())
            assert bias_gradient.numpy().tobytes() == expected.tobytes()
            untransposed, again = operator.relu_backward(gradient.clone(), output, False)
            assert untransposed.numel() == 0 and torch.equal(again, bias_gradient)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_and_infinity_come_out(dtype: torch.dtype) -> None:
    x, weights, biases = problem(6, [5, 40, 30, 1])
    x[1, 2], x[3, 0], x[4, 4] = torch.nan, torch.inf, -torch.inf
    out = mlp(x.to(dtype), weights, biases, relu_last=False)
    assert out.isfinite().flatten().tolist() == [True, False, True, False, False, True]


def test_the_gradient_that_comes_in_is_left_alone() -> None:
    x, weights, biases = problem(4, [3, 2])
    weights[0].requires_grad_()
    out = mlp(x, weights, biases, relu_last=True)
    upper = torch.ones_like(out)
    out.backward(upper)
    assert torch.equal(upper, torch.ones_like(out)) and x.grad is None


def test_any_layout_of_gradient_and_input() -> None:
    x, weights, biases = problem(40, [6, 5])
    weights[0].requires_grad_()
    results = []
    for layout in (lambda t: t, lambda t: t.t().contiguous().t()):
        (gradient,) = torch.autograd.grad(
            mlp(layout(x), weights, biases, relu_last=False), weights, layout(torch.arange(200.0).view(40, 5))
        )
        results.append(gradient)
    assert torch.equal(*results)


def test_float64_empty_batches_and_no_inputs() -> None:
    assert torch.autograd.gradcheck(
        lambda x, w, b: mlp(x, [w], [b], relu_last=False),
        tuple(t.double().requires_grad_() for t in (torch.randn(3, 2), torch.randn(4, 2), torch.randn(4))),
    )
    _, weights, biases = problem(1, [2, 3])
    assert mlp(torch.zeros(0, 2), weights, biases, relu_last=True).shape == (0, 3)
    assert torch.equal(mlp(torch.zeros(2, 0), [torch.zeros(3, 0)], biases, relu_last=False), biases[0].expand(2, 3))


@pytest.mark.parametrize("transpose", [False, True])
def test_torch_accepts_the_operator(transpose: bool) -> None:
    for dtype in (F32, BF16):
        arguments = torch.randn(5, 3).to(dtype), torch.randn(5, 3).to(dtype), transpose
        torch.library.opcheck(torch.ops.meseta.relu_backward.default, arguments)


def test_gradients_that_do_not_fit_are_named() -> None:
    for gradient, output in (
        (torch.zeros(3, 4).t(), None),
        (torch.zeros(3), None),
        (torch.zeros(3, 4), torch.zeros(3, 5)),
        (torch.zeros(3, 4), torch.zeros(3, 4, dtype=BF16)),
    ):
        with pytest.raises(MesetaError, match="relu_backward: the gradient is"):
            torch.ops.meseta.relu_backward(gradient, output, False)
