"""Cases of the Triton kernels of the dense part, for the interpreter on a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.ops.cross_entropy import reference as cross_entropy_reference
from meseta.ops.dot_interaction import reference as dot_reference
from meseta.ops.mlp import reference as mlp_reference
from meseta.ops.mlp.gpu import GpuMlp
from meseta.ops.step_verdict import REJECTED_ID, VerdictMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers."""
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape)).to(dtype)


def check_accuracy(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Check the documented tolerance: twice the error of the reference, plus one unit in the last place."""
    got = got.cpu()
    assert got.shape == plain.shape and got.dtype == plain.dtype
    if not got.numel():
        return
    # The interpreter truncates bfloat16. Float64 has no more exact reference.
    ulp = torch.finfo(got.dtype).eps * float(exact.abs().max()) * (64 if got.dtype == torch.float64 else 1)
    assert float((got.double() - exact).abs().max()) <= 2 * float((plain.double() - exact).abs().max()) + ulp


def check_mask_and_sum(num_samples: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Check masked gradients and their sums, and that other columns of the sums are not written."""
    from meseta.ops.mlp import triton

    gradient, output = numbers(1, num_samples, width, dtype=dtype), numbers(2, num_samples, width, dtype=dtype)
    sums = mlp_reference.new_block_sums(gradient, width + 3).fill_(7.0)
    got = sums.to(device, copy=True)
    wide = torch.cat([gradient, torch.full_like(gradient, torch.nan)], dim=1).to(device)
    masked = triton.mask_and_sum(wide[:, :width], output.to(device), got, 2)
    expected = mlp_reference.mask_and_sum(gradient, output, sums, 2)
    assert torch.equal(masked.cpu(), expected)
    exact = torch.stack([block.double().sum(0) for block in expected.split(mlp_reference.BLOCK_SAMPLES)])
    check_accuracy(got[:, 2:-1], sums[:, 2:-1], exact)
    assert got[:, :2].eq(7.0).all() and got[:, -1].eq(7.0).all()


def check_scalar_linear(num_samples: int, width: int, dtype: torch.dtype, relu: bool, device: str) -> None:
    """Check a layer with one output, its gradients, and that other columns of the sums are not written."""
    from meseta.ops.mlp import triton

    x, weight = numbers(1, num_samples, width, dtype=dtype), numbers(2, width, dtype=dtype)
    gradient = numbers(3, num_samples, 1, dtype=dtype)
    for bias in (None, numbers(4, 1, dtype=dtype)):
        moved = None if bias is None else bias.to(device)
        got = triton.scalar_linear(x.to(device), weight.to(device), moved, relu)
        plain = mlp_reference.scalar_linear(x, weight, bias, relu)
        exact = mlp_reference.scalar_linear(x.double(), weight.double(), None if bias is None else bias.double(), relu)
        check_accuracy(got, plain, exact)
    sums = mlp_reference.new_block_sums(gradient, 2 * width + 3).fill_(7.0)
    got_sums, exact_sums = sums.to(device, copy=True), sums.double()
    got = triton.scalar_linear_backward(gradient.to(device), x.to(device), weight.to(device), relu, got_sums, width + 1)
    plain = mlp_reference.scalar_linear_backward(gradient, x, weight, relu, sums, width + 1)
    exact = mlp_reference.scalar_linear_backward(
        gradient.double(), x.double(), weight.double(), relu, exact_sums, width + 1
    )
    check_accuracy(got, plain, exact)
    check_accuracy(got_sums, sums, exact_sums)
    for unwritten in (got_sums[:, :1], got_sums[:, -1:], *([] if relu else [got_sums[:, : width + 1]])):
        assert unwritten.eq(7.0).all()


def check_linear_relu(num_samples: int, num_inputs: int, num_outputs: int, device: str) -> None:
    """Check a layer that is computed with its ReLU. NaN stays NaN."""
    from meseta.ops.mlp import triton

    x, weight = numbers(1, num_samples, num_inputs), numbers(2, num_outputs, num_inputs)
    for bias in (None, numbers(3, num_outputs)):
        moved = [None if value is None else value.to(device, copy=True) for value in (x, weight, bias)]
        exact = mlp_reference.linear_relu(x.double(), weight.double(), None if bias is None else bias.double())
        check_accuracy(triton.linear_relu(*moved), mlp_reference.linear_relu(x, weight, bias), exact)
        moved[0][0, -1] = torch.nan
        assert triton.linear_relu(*moved).isnan().all(1).tolist() == [True] + [False] * (num_samples - 1)


def check_gpu_mlp(
    num_samples: int, widths: Sequence[int], dtype: torch.dtype, bias: bool, relu_last: bool, device: str
) -> None:
    """Compare result and gradients of a stack with plain torch. Parameters are float32, or float64 for float64."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [numbers(k, n, m, dtype=kept) / m**0.5 for k, (m, n) in enumerate(pairwise(widths))]
    biases = [numbers(k, n, dtype=kept) if bias else None for k, n in enumerate(widths[1:])]
    x, gradient = numbers(1, num_samples, widths[0], dtype=dtype), numbers(2, num_samples, widths[-1], dtype=dtype)

    def run(call: Any, tensors: Sequence[Tensor | None], upper: Tensor) -> list[Tensor]:
        leaves = [None if value is None else value.detach().clone().requires_grad_() for value in tensors]
        count = len(weights)
        out = call(leaves[0], leaves[1 : 1 + count], leaves[1 + count :])
        out.backward(upper)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]

    def plain(x: Tensor, weights: Any, biases: Any) -> Tensor:
        return mlp_reference.mlp(x, weights, biases, relu_last=relu_last)

    tensors = [x, *weights, *biases]
    moved = [None if value is None else value.to(device) for value in tensors]
    got = run(lambda x, weights, biases: GpuMlp.apply(x, relu_last, *weights, *biases), moved, gradient.to(device))
    doubles = [None if value is None else value.double() for value in tensors]
    results = run(plain, tensors, gradient), run(plain, doubles, gradient.double())
    for result, reference, exact in zip((tensor.cpu() for tensor in got), *results, strict=True):
        assert result.dtype == reference.dtype and result.shape == reference.shape
        # A value close to a kink may fall to either side of it, so norms are compared.
        scale = torch.finfo(dtype).eps * float(exact.abs().max()) * exact.numel() ** 0.5
        scale *= 64 if dtype == torch.float64 else 1  # Float64 has no more exact reference.
        errors = [float((value.double() - exact).norm()) for value in (result, reference)]
        assert errors[0] <= 2 * errors[1] + scale


def check_cross_entropy(shape: Sequence[int], factors: str, dtype: torch.dtype, device: str) -> None:
    """Check the sum and its gradient against float64, with small and large logits."""
    from meseta.ops.cross_entropy import triton

    logits = numbers(1, *shape, dtype=dtype) * torch.where(numbers(2, *shape) > 0, 1, 40).to(dtype)
    label = (numbers(3, *shape) > 0).to(dtype)
    factor = {"none": None, "each": numbers(4, *shape), "rows": numbers(4, shape[0], *[1] * (len(shape) - 1))}[factors]
    factor = None if factor is None else factor.to(dtype)
    arguments = logits, label, factor
    moved = [None if value is None else value.to(device) for value in arguments]
    doubles = [None if value is None else value.double() for value in arguments]
    got, exact = triton.cross_entropy(*moved).cpu(), cross_entropy_reference.cross_entropy(*doubles)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12 * logits.numel())
    check_loss_step(arguments, device)
    upper = torch.tensor(0.3, dtype=torch.float64)
    leaf = logits.double().clone().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy_reference.cross_entropy(leaf, *doubles[1:]), leaf, upper)
    plain = cross_entropy_reference.cross_entropy_backward(upper, *arguments)
    check_accuracy(triton.cross_entropy_backward(upper.to(device), *moved), plain, exact)


def check_loss_step(arguments: Sequence[Tensor | None], device: str) -> None:
    """Check loss, gradient and verdict of one launch against plain torch, twice with the same memory."""
    from meseta.ops.cross_entropy import triton

    memory, flags = VerdictMemory.create(torch.device(device)), torch.tensor([0.0, 1.0])
    doubles = [None if value is None else value.double() for value in arguments]
    moved = [None if value is None else value.to(device) for value in arguments]
    for number, words in enumerate(([0, 0, -1, 0, 0, 5, 6], [REJECTED_ID, 0])):
        scale, expected = torch.tensor(0.3 + number, dtype=torch.float64), torch.tensor(words)
        report = expected.to(device, copy=True)
        gradient = triton.cross_entropy_step(*moved, scale.to(device), memory.words, report)
        plain = cross_entropy_reference.cross_entropy_step(*arguments, scale, flags, expected)
        losses = [one.cpu()[1:2].view(torch.float64) for one in (report, expected)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12 * gradient.numel())
        check_accuracy(gradient, plain, cross_entropy_reference.cross_entropy_backward(scale, *doubles))
        assert report[::2].tolist() == expected[::2].tolist() and report[3:].tolist() == expected[3:].tolist()
        assert memory.flags.tolist() == flags.tolist() == [float(number), float(1 - number)]
        assert memory.words[1].item() == 0


def check_dot_interaction(num_samples: int, num_features: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Check pairwise products and their gradients against plain torch and float64."""
    from meseta.ops.dot_interaction import triton

    x, pooled = numbers(1, num_samples, dim, dtype=dtype), numbers(2, num_samples, num_features * dim)
    gradient = numbers(3, num_samples, dim + num_features * (num_features + 1) // 2, dtype=dtype)
    moved = [value.to(device) for value in (gradient, x, pooled)]
    doubles = [value.double() for value in (gradient, x, pooled)]
    check_accuracy(
        triton.dot_interaction(*moved[1:]),
        dot_reference.dot_interaction(x, pooled),
        dot_reference.dot_interaction(*doubles[1:]),
    )
    for result, plain, exact in zip(
        triton.dot_interaction_backward(*moved),
        dot_reference.dot_interaction_backward(gradient, x, pooled),
        dot_reference.dot_interaction_backward(*doubles),
        strict=True,
    ):
        check_accuracy(result, plain, exact)
