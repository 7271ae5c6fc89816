"""Cases of the Triton kernels of the dense part, for the interpreter on a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.ops.cross_entropy import reference as cross_entropy_reference
from meseta.ops.dot_interaction import reference as dot_reference
from meseta.ops.linear import reference as linear_reference
from meseta.ops.mlp import reference as mlp_reference
from meseta.ops.mlp.gpu import GpuMlp
from meseta.ops.step_verdict import REJECTED_ID, VerdictMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers."""
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape)).to(dtype)


def check_accuracy(got: Tensor, plain: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> None:
    """Check the documented tolerance: twice the error of the reference, plus one unit in the last place.

    `magnitude` is the result for the absolute values of all operands, of which units are a part if terms may cancel.
    """
    got = got.cpu()
    assert got.shape == plain.shape and got.dtype == plain.dtype
    if not got.numel():
        return
    # The interpreter truncates bfloat16. Float64 has no more exact reference.
    largest = float((exact if magnitude is None else magnitude).abs().max())
    ulp = torch.finfo(got.dtype).eps * largest * (64 if got.dtype == torch.float64 else 1)
    assert float((got.double() - exact).abs().max()) <= 2 * float((plain.double() - exact).abs().max()) + ulp


def check_mask_and_sum(num_samples: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Check masked gradients and their sums, and that other columns of the sums are not written."""
    from meseta.ops.linear import triton

    gradient, output = numbers(1, num_samples, width, dtype=dtype), numbers(2, num_samples, width, dtype=dtype)
    sums = linear_reference.new_block_sums(gradient, width + 3).fill_(7.0)
    got = sums.to(device, copy=True)
    wide = torch.cat([gradient, torch.full_like(gradient, torch.nan)], dim=1).to(device)
    masked = triton.mask_and_sum(wide[:, :width], output.to(device), got, 2)
    expected = linear_reference.mask_and_sum(gradient, output, sums, 2)
    assert torch.equal(masked.cpu(), expected)
    exact = torch.stack([block.double().sum(0) for block in expected.split(linear_reference.BLOCK_SAMPLES)])
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
        doubles = x.double(), weight.double(), None if bias is None else bias.double()
        magnitude = mlp_reference.scalar_linear(*(None if one is None else one.abs() for one in doubles), relu)
        check_accuracy(got, plain, mlp_reference.scalar_linear(*doubles, relu), magnitude)
    sums = linear_reference.new_block_sums(gradient, 2 * width + 3).fill_(7.0)
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


def layer(num_samples: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random tensors of a linear layer with x, p and their gradients."""
    shapes = {
        "x": (num_samples, num_inputs),
        "weight": (num_outputs, num_inputs),
        "bias": (num_outputs,),
        "x0": (num_samples, num_outputs),
        "added": (num_samples, num_outputs),
        "gradient": (num_samples, num_outputs),
        "mask": (num_samples, num_inputs),
        "residual": (num_samples, num_inputs),
    }
    return {name: numbers(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def check_linear(num_samples: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str) -> None:
    """Check the products of a layer with rows of x that are part of a matrix, with ReLU, and of a cross layer."""
    from meseta.ops.linear import triton

    tensors = layer(num_samples, num_inputs, num_outputs, dtype)
    x, weight, x0, added = (tensors[name] for name in ("x", "weight", "x0", "added"))
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1).to(device)[:, :num_inputs]
    for bias in (None, tensors["bias"]):
        exact = [None if value is None else value.double() for value in (x, weight, bias)]
        moved = [wide, weight.to(device), None if bias is None else bias.to(device)]
        for relu in (False, True):
            plain = linear_reference.linear(x, weight, bias, relu)
            check_accuracy(triton.linear(*moved, relu), plain, linear_reference.linear(*exact, relu))
        for result in zip(
            triton.linear_cross(*moved, x0.to(device), added.to(device)),
            linear_reference.linear_cross(x, weight, bias, x0, added),
            linear_reference.linear_cross(*exact, x0.double(), added.double()),
            strict=True,
        ):
            check_accuracy(*result)


def check_linear_backward(
    num_samples: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, options: Collection[str], device: str
) -> None:
    """Check the gradients of a layer. `options` has those of "input", "mask" and "residual" that are passed."""
    from meseta.ops.linear import triton

    tensors = layer(num_samples, num_inputs, num_outputs, dtype)
    gradient, x, weight = (tensors[name] for name in ("gradient", "x", "weight"))
    mask, residual = (tensors[name] if name in options else None for name in ("mask", "residual"))
    sums = linear_reference.new_block_sums(gradient, num_inputs + 3).fill_(7.0)
    arguments = gradient, x, weight, "input" in options, mask, residual
    plain = linear_reference.linear_backward(*arguments, sums.clone(), 2)
    doubles = [value.double() if isinstance(value, Tensor) else value for value in arguments]
    exact = linear_reference.linear_backward(*doubles, sums.double(), 2)
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in arguments]
    moved[0] = torch.cat([gradient, torch.full_like(gradient, torch.nan)], dim=1).to(device)[:, :num_outputs]
    got_sums = sums.to(device, copy=True)
    for result in zip(triton.linear_backward(*moved, got_sums, 2), plain, exact, strict=True):
        check_accuracy(*result)
    if mask is not None:
        check_masked_sums(triton.linear_backward(*moved, got_sums, 2)[0], got_sums, 2)
    if "input" in options:
        check_accuracy(triton.input_gradient(*moved[:3], *moved[4:], got_sums, 2), plain[0], exact[0])
    assert got_sums[:, :2].eq(7.0).all() and got_sums[:, 2 if mask is None else -1 :].eq(7.0).all()


def check_masked_sums(masked: Tensor, sums: Tensor, column: int) -> None:
    """Check the sums of a masked gradient over blocks of samples."""
    blocks = masked.cpu().split(linear_reference.BLOCK_SAMPLES)
    # Numpy's cumulative sums are sequential, as those of a kernel may be.
    plain, exact = (
        torch.from_numpy(np.stack([block.to(dtype).numpy().cumsum(axis=0)[-1] for block in blocks]))
        for dtype in (sums.dtype, torch.float64)
    )
    check_accuracy(sums[:, column : column + masked.shape[1]], plain, exact)


def check_extremes(dtype: torch.dtype, device: str) -> None:
    """Check that NaN and infinity come out where plain torch has them."""
    from meseta.ops.linear import triton

    tensors = layer(40, 20, 50, dtype)
    for k, tensor in enumerate(tensors.values()):
        for index, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
            tensor.view(-1)[7 * k + 3 * index + 1] = value
    x, weight, bias, x0, added, gradient, mask, residual = tensors.values()
    moved = [tensor.to(device) for tensor in tensors.values()]
    pairs = [
        ((triton.linear(*moved[:3], True),), (linear_reference.linear(x, weight, bias, True),)),
        (triton.linear_cross(*moved[:5]), linear_reference.linear_cross(x, weight, bias, x0, added)),
    ]
    results = []
    for function, (one, two, three, four, five) in (
        (triton.linear_backward, (moved[5], *moved[:2], *moved[6:])),
        (linear_reference.linear_backward, (gradient, x, weight, mask, residual)),
    ):
        sums = linear_reference.new_block_sums(one, 20)
        results.append((*function(one, two, three, True, four, five, sums, 0), sums))
    for got, plain in (*pairs, tuple(results)):
        for value, expected in zip(got, plain, strict=True):
            assert expected.isnan().any() and not expected.isnan().all()
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(value.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


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
    magnitudes = [None if value is None else value.abs() for value in doubles]
    results = (
        run(plain, tensors, gradient),
        run(plain, doubles, gradient.double()),
        run(plain, magnitudes, gradient.double().abs()),
    )
    for result, reference, exact, magnitude in zip((tensor.cpu() for tensor in got), *results, strict=True):
        assert result.dtype == reference.dtype and result.shape == reference.shape
        # A value close to a kink may fall to either side of it, so norms are compared. Terms may cancel each other.
        scale = torch.finfo(dtype).eps * float(magnitude.norm())
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
