"""Reference of linear layers on a GPU in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from meseta.sparse.shapes import Float

BLOCK_SAMPLES = 256
"""Number of samples per block of `new_block_sums`."""


def new_block_sums(gradient: Float[Tensor, "B N"], width: int) -> Float[Tensor, "blocks _width"]:
    """Return uninitialized sums over blocks of 256 samples, float32 or for a float64 gradient float64."""
    return gradient.new_empty(-(-len(gradient) // BLOCK_SAMPLES), width, dtype=sum_dtype(gradient))


def sum_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of sums over samples: float64 for float64, otherwise float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def linear(
    x: Float[Tensor, "B N"], weight: Float[Tensor, "M N"], bias: Float[Tensor, " M"] | None, relu: bool
) -> Float[Tensor, "B M"]:
    """Implement `meseta.ops.linear.linear` in plain PyTorch."""
    out = functional.linear(x, weight, bias)
    return functional.relu(out) if relu else out


def linear_cross(
    t: Float[Tensor, "B R"],
    weight: Float[Tensor, "N R"],
    bias: Float[Tensor, " N"] | None,
    x0: Float[Tensor, "B N"],
    x: Float[Tensor, "B N"],
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Implement `meseta.ops.linear.linear_cross` in plain PyTorch. With bfloat16, p is rounded before it is used."""
    p = functional.linear(t, weight, bias)
    return torch.addcmul(x, x0, p), p


def linear_backward(
    gradient: Float[Tensor, "B M"],
    x: Float[Tensor, "B N"],
    weight: Float[Tensor, "M N"],
    needs_input: bool,
    mask: Float[Tensor, "B N"] | None,
    residual: Float[Tensor, "B N"] | None,
    sums: Float[Tensor, "blocks width"] | None,
    column: int,
) -> tuple[Float[Tensor, "_B _N"], Float[Tensor, "M N"]]:
    """Implement the operator `meseta::linear_backward` in plain PyTorch."""
    weight_gradient = torch.mm(gradient.t().to(sum_dtype(gradient)), x.to(sum_dtype(gradient)))
    if not needs_input:
        return gradient.new_empty(0, 0), weight_gradient
    result = torch.mm(gradient, weight) if residual is None else torch.addmm(residual, gradient, weight)
    if mask is not None:
        assert sums is not None
        result = mask_and_sum(result, mask, sums, column)
    return result, weight_gradient


def mask_and_sum(
    gradient: Float[Tensor, "B N"], output: Float[Tensor, "B N"], sums: Float[Tensor, "blocks width"], column: int
) -> Float[Tensor, "B N"]:
    """Return the gradient before a ReLU with `output`. Its block sums are written to N columns from `column` on."""
    masked = torch.where(output > 0, gradient, 0)
    write_block_sums(sums[:, column:], masked)
    return masked


def write_block_sums(sums: Float[Tensor, "blocks width"], values: Float[Tensor, "B N"]) -> None:
    """Write the sum over each block of samples to the first N columns of `sums`."""
    for line, block in zip(sums, values.split(BLOCK_SAMPLES), strict=len(values) > 0):
        torch.sum(block, dim=0, dtype=sums.dtype, out=line[: values.shape[1]])
