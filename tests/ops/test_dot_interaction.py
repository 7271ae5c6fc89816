"""Tests of the dot interaction against numpy loops, its reference, numerical gradients and other numbers of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import each_core
from meseta.ops import dot_interaction as operator
from meseta.ops.dot_interaction import dot_interaction, reference
from meseta.spec import MesetaError

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(0, 2, 3), (1, 1, 1), (5, 3, 4), (37, 26, 16), (33, 8, 19), (18, 7, 64), (16, 0, 5), (17, 32, 17)]


def problem(num_samples: int, num_features: int, dim: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, pooled embeddings and the gradient of the result."""
    random = np.random.default_rng([num_samples, num_features, dim])
    width = dim + num_features * (num_features + 1) // 2
    x, pooled, gradient = (random.normal(size=(num_samples, n)) for n in (dim, num_features * dim, width))
    return torch.from_numpy(x).to(dtype), torch.from_numpy(pooled).float(), torch.from_numpy(gradient).to(dtype)


def run(x: Tensor, pooled: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and the gradients of x and pooled."""
    x, pooled = x.clone().requires_grad_(), pooled.clone().requires_grad_()
    out = dot_interaction(x, pooled)
    out.backward(gradient)
    assert x.grad is not None and pooled.grad is not None
    return out.detach(), x.grad, pooled.grad


def by_hand(x: Tensor, pooled: Tensor, gradient: Tensor) -> tuple[Any, ...]:
    """Compute the result and both gradients in float64, pair by pair."""
    left, right, upper = x.double().numpy(), pooled.double().numpy(), gradient.double().numpy()
    num_samples, dim = left.shape
    vectors = np.concatenate([left, right], axis=1).reshape(num_samples, 1 + right.shape[1] // dim, dim)
    parts, place = [left], dim
    result = np.zeros_like(vectors)
    result[:, 0] = upper[:, :dim]
    for i in range(vectors.shape[1]):
        for j in range(i):
            parts.append((vectors[:, i] * vectors[:, j]).sum(axis=1, keepdims=True))
            result[:, i] += upper[:, place, None] * vectors[:, j]
            result[:, j] += upper[:, place, None] * vectors[:, i]
            place += 1
    return np.concatenate(parts, axis=1), result[:, 0], result[:, 1:].reshape(right.shape)


@given(st.integers(0, 40), st.integers(0, 12), st.integers(1, 40), st.sampled_from([F32, BF16]))
@example(2, 101, 3, F32)
def test_equals_pairs_by_hand(num_samples: int, num_features: int, dim: int, dtype: torch.dtype) -> None:
    given_problem = problem(num_samples, num_features, dim, dtype)
    for result, exact in zip(run(*given_problem), by_hand(*given_problem), strict=True):
        epsilon = torch.finfo(result.dtype).eps
        np.testing.assert_allclose(result.double().numpy(), exact, rtol=epsilon, atol=(num_features + dim) * 4e-7)


@pytest.mark.parametrize("shape", [(300, 26, 16), (64, 26, 64), (50, 5, 128)])
def test_error_is_at_most_twice_that_of_the_reference(shape: tuple[int, int, int]) -> None:
    x, pooled, gradient = problem(*shape)
    plain = reference.dot_interaction(x, pooled), *reference.dot_interaction_backward(gradient, x, pooled)
    for result, reference_result, exact in zip(
        run(x, pooled, gradient), plain, by_hand(x, pooled, gradient), strict=True
    ):
        largest = np.spacing(np.float32(np.abs(exact).max()))
        errors = [np.abs(value.double().numpy() - exact).max() for value in (result, reference_result)]
        assert errors[0] <= 2 * errors[1] + largest


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_any_threads_and_instruction_set(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_problem = problem(*shape, dtype)
    results = []
    for _ in each_core(operator, monkeypatch):
        for num_threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
            results.append(run(*given_problem))
    assert len(results) >= 3
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_sample_alone_gives_the_same_bits() -> None:
    x, pooled, gradient = problem(35, 5, 20)
    whole = run(x, pooled, gradient)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    for result, expected in zip(run(x[order], pooled[order], gradient[order]), whole, strict=True):
        assert torch.equal(result, expected[order])
    for result, expected in zip(run(x[34:], pooled[34:], gradient[34:]), whole, strict=True):
        assert torch.equal(result, expected[34:])


def test_literal_values() -> None:
    x, pooled = torch.tensor([[2.0, 1.0]]), torch.tensor([[3.0, 0.0, 5.0, 7.0]])
    out, x_gradient, pooled_gradient = run(x, pooled, torch.tensor([[0.5, 0.25, 1.0, 10.0, 100.0]]))
    assert out.tolist() == [[2.0, 1.0, 6.0, 17.0, 15.0]]  # x, <e1, x>, <e2, x>, <e2, e1>
    assert x_gradient.tolist() == [[0.5 + 3.0 + 50.0, 0.25 + 70.0]]
    assert pooled_gradient.tolist() == [[2.0 + 500.0, 1.0 + 700.0, 20.0 + 300.0, 10.0]]


def test_reference_and_its_backward_agree_with_finite_differences() -> None:
    x, pooled, gradient = (t.double() for t in problem(3, 4, 2))
    inputs = x.requires_grad_(), pooled.requires_grad_()
    assert torch.autograd.gradcheck(dot_interaction, inputs)  # float64 takes the reference, forward and backward
    plain = torch.autograd.grad(reference.dot_interaction(*inputs), inputs, gradient)
    written = reference.dot_interaction_backward(gradient, *inputs)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(plain, written, strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_torch_accepts_the_operators(dtype: torch.dtype) -> None:
    x, pooled, gradient = problem(5, 3, 4, dtype)
    inputs = x.requires_grad_(), pooled.requires_grad_()
    torch.library.opcheck(torch.ops.meseta.dot_interaction.default, inputs)
    torch.library.opcheck(torch.ops.meseta.dot_interaction_backward.default, (gradient, x.detach(), pooled.detach()))


def test_strided_inputs_are_read_as_they_are() -> None:
    x, pooled, gradient = problem(9, 3, 4)
    wide = torch.cat([pooled, torch.full((9, 1), torch.nan)], dim=1)[:, :-1]
    for result, expected in zip(run(x.t().contiguous().t(), wide, gradient), run(x, pooled, gradient), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 7)), ((2, 3), (1, 6)), ((2, 0), (2, 0)), ((2,), (2, 4))])
def test_shapes_that_do_not_fit_are_named(shapes: Any) -> None:
    x, pooled = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(MesetaError, match="not a whole number of vectors"):
        torch.ops.meseta.dot_interaction(x, pooled)
    with pytest.raises(MesetaError, match="not a whole number of vectors"):
        torch.ops.meseta.dot_interaction_backward(torch.zeros(2, 5), x, pooled)
    with pytest.raises(MesetaError, match=r"the gradient is torch.float32 \(2, 5\), but the result was .* \(2, 6\)"):
        torch.ops.meseta.dot_interaction_backward(torch.zeros(2, 5), torch.zeros(2, 3), torch.zeros(2, 6))
