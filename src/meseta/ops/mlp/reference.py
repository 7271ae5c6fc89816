"""Reference of `mlp` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meseta.ops.common import column_sums
from meseta.ops.linear.reference import write_block_sums
from meseta.sparse.shapes import Float


def mlp(
    x: Float[Tensor, "B N"],
    weights: Sequence[Float[Tensor, "_outputs _inputs"]],
    biases: Sequence[Float[Tensor, " _outputs"] | None],
    *,
    relu_last: bool,
) -> Float[Tensor, "B outputs"]:
    """Implement `meseta.ops.mlp.mlp` in plain PyTorch."""
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        if relu_last or index < len(weights) - 1:
            x = functional.relu(x)
    return x


def relu_backward(
    gradient: Float[Tensor, "B N"], output: Float[Tensor, "B N"] | None, transpose: bool
) -> tuple[Float[Tensor, "_N _B"], Float[Tensor, " N"]]:
    """Implement `meseta.ops.mlp.relu_backward` in plain PyTorch, for any dtype."""
    if output is not None:
        gradient.masked_fill_(~(output > 0), 0)
    transposed = gradient.t().contiguous() if transpose else gradient.new_empty(0, 0)
    return transposed, column_sums(gradient)


def scalar_linear(
    x: Float[Tensor, "B N"], weight: Float[Tensor, " N"], bias: Float[Tensor, " one"] | None, relu: bool
) -> Float[Tensor, "B one"]:
    """Return the products of the rows of x, after a ReLU if `relu`, with `weight`, plus `bias`."""
    return functional.linear(functional.relu(x) if relu else x, weight[None], bias)


def scalar_linear_backward(
    gradient: Float[Tensor, "B one"],
    x: Float[Tensor, "B N"],
    weight: Float[Tensor, " N"],
    relu: bool,
    sums: Float[Tensor, "blocks width"],
    column: int,
) -> Float[Tensor, "B N"]:
    """Return the gradient of x. Block sums of the gradients of the bias and the weight are written to 1 + N columns
    from `column` on. With `relu`, those of x are written to the N columns before."""
    x_gradient, activation = gradient * weight, x
    if relu:
        x_gradient, activation = torch.where(x > 0, x_gradient, 0), functional.relu(x)
        write_block_sums(sums[:, column - len(weight) :], x_gradient)
    write_block_sums(sums[:, column:], gradient)
    write_block_sums(sums[:, column + 1 :], gradient.to(sums.dtype) * activation.to(sums.dtype))
    return x_gradient
