"""Reference of `cross_network` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meseta.ops.linear.reference import write_block_sums
from meseta.sparse.shapes import Float


def cross_network(
    x0: Float[Tensor, "B N"],
    down: Sequence[Float[Tensor, "_rank N"]],
    up: Sequence[Float[Tensor, "N _inputs"]],
    biases: Sequence[Float[Tensor, " N"]],
) -> Float[Tensor, "B N"]:
    """Implement `meseta.ops.cross_network.cross_network` in plain PyTorch."""
    x = x0
    for layer, (weight, bias) in enumerate(zip(up, biases, strict=True)):
        inputs = functional.linear(x, down[layer].to(x.dtype)) if down else x
        x = torch.addcmul(x, x0, functional.linear(inputs, weight.to(x.dtype), bias.to(x.dtype)))
    return x


def cross_backward(
    gradient: Float[Tensor, "B N"],
    x0: Float[Tensor, "B N"],
    product: Float[Tensor, "B N"],
    x0_gradient: Float[Tensor, "B N"],
    sums: Float[Tensor, "blocks N"],
    is_last: bool,
    is_first: bool,
) -> Float[Tensor, "B N"]:
    """Return the gradient of `product`, which is U V x + b, from the gradient of x + x0 * product.

    The gradient of x0 is added to `x0_gradient`, which the last layer overwrites. In the first layer x is x0, so that
    the gradient of x is added too. `sums` receives the sums of the result over blocks of samples.
    """
    upper = gradient.to(sums.dtype)
    added = upper * product if is_last else torch.addcmul(x0_gradient.to(sums.dtype), upper, product)
    x0_gradient.copy_(added + upper if is_first else added)
    product_gradient = upper * x0
    write_block_sums(sums, product_gradient)
    return product_gradient.to(x0.dtype)
