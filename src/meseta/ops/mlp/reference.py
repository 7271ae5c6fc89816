"""Reference of `mlp` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from meseta.ops.common import column_sums
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
