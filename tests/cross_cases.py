"""Cases of cross networks and concatenated columns, for Triton's interpreter on a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dense_cases import DTYPES, numbers
from meseta.ops.concat import reference as concat_reference
from meseta.ops.cross_network import GpuCrossNetwork, reference
from meseta.ops.linear import new_block_sums
from sampling import product

MAX_ULPS = 4
CONVERSIONS: list[Callable[[Tensor], Tensor]] = [Tensor.clone, Tensor.double, lambda tensor: tensor.double().abs()]
"""Conversions of inputs by which a function computes expected dtypes, exact results, and sums of absolute values."""
LAYERS = product(
    num_samples=[1, 9, 256, 600],
    width=[1, 7, 64, 130],
    position=["first", "inner", "last", "only"],
    dtype=DTYPES,
)
NETWORKS = product(num_samples=[1, 30, 300], width=[1, 5, 70], rank=[0, 1, 9], num_layers=[1, 2, 3], dtype=DTYPES)


def run_cross_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], position: str) -> list[Tensor]:
    """Return the gradients of the product and of x0, and the block sums. Columns of the gradient are not adjacent."""
    gradient, x0, products, x0_gradient = (tensor.clone() for tensor in inputs)
    wide = torch.cat([gradient, torch.full_like(gradient, torch.nan)], dim=1)[:, : x0.shape[1]]
    sums = new_block_sums(x0, x0.shape[1])
    is_last, is_first = position in ("last", "only"), position in ("first", "only")
    if is_last:
        x0_gradient.fill_(torch.nan)
    return [function(wide, x0, products, x0_gradient, sums, is_last, is_first), x0_gradient, sums]


def check_cross_backward(num_samples: int, width: int, position: str, dtype: torch.dtype, device: str) -> None:
    """Check the element-wise part of a layer's backward pass."""
    from meseta.ops.cross_network import triton

    inputs = [numbers(k, num_samples, width, dtype=dtype) for k in range(4)]
    got = run_cross_backward(triton.cross_backward, [tensor.to(device) for tensor in inputs], position)
    check_errors(lambda *tensors: run_cross_backward(reference.cross_backward, tensors, position), inputs, got)


def check_errors(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Check each element of `got` against `function` in float64.

    An error is at most MAX_ULPS units in the last place of the first input, relative to the sum of the absolute values
    of all terms.
    """
    unit = MAX_ULPS * torch.finfo(inputs[0].dtype).eps
    expected = (function(*(convert(tensor) for tensor in inputs)) for convert in CONVERSIONS)
    for result, plain, exact, terms in zip(got, *expected, strict=True):
        assert result.shape == plain.shape and result.dtype == plain.dtype
        assert ((result.cpu() - exact).abs() <= unit * terms).all()


def check_cross_network(
    num_samples: int, width: int, rank: int, num_layers: int, dtype: torch.dtype, device: str
) -> None:
    """Compare result and gradients with plain torch. Rank 0 means full rank. Parameters are float32, or float64 for
    float64."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [*([(rank, width)] * num_layers if rank else []), *[(width, rank or width)] * num_layers]
    parameters = [numbers(k, *shape, dtype=kept) / shape[1] ** 0.5 for k, shape in enumerate(shapes)]
    parameters += [numbers(k, width, dtype=kept) for k in range(num_layers)]
    tensors = [*(numbers(k, num_samples, width, dtype=dtype) for k in range(2)), *parameters]

    def run(call: Callable[..., Tensor], upper: Tensor, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upper)]

    def plain(x0: Tensor, *parameters: Tensor) -> Tensor:
        first, second = len(parameters) - 2 * num_layers, len(parameters) - num_layers
        return reference.cross_network(x0, parameters[:first], parameters[first:second], parameters[second:])

    def fused(x0: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = GpuCrossNetwork.apply(x0, num_layers, *parameters)
        return result

    got = run(fused, *(tensor.to(device) for tensor in tensors))
    check_errors(lambda *tensors: run(plain, *tensors), tensors, got)


def check_concat(num_samples: int, widths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Check that columns of float32 and of another dtype have the bits of plain torch."""
    from meseta.ops.concat import triton

    a, b = numbers(1, num_samples, widths[0], dtype=dtype), numbers(2, num_samples, widths[1], dtype=dtype).float()
    for target in {dtype, torch.float32}:
        got = triton.concat(a.to(device), b.to(device), target).cpu()
        assert got.dtype == target and torch.equal(got, concat_reference.concat(a, b, target))
