"""Cross network of DCN-V2 (arXiv 2008.13535, section 3). On a GPU the whole network is one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.ops.common import add_product, cast_all, register
from meseta.ops.cross_network import reference
from meseta.ops.linear import linear, linear_backward, linear_cross, new_block_sums
from meseta.ops.mlp import mlp
from meseta.ops.product import DTYPE_CODES
from meseta.sparse.shapes import Float


def cross_network(
    x0: Float[Tensor, "B N"],
    down: Sequence[Float[Tensor, "_rank N"]],
    up: Sequence[Float[Tensor, "N _inputs"]],
    biases: Sequence[Float[Tensor, " N"]],
) -> Float[Tensor, "B N"]:
    """Apply cross layers x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l.

    Args:
        x0: Input. Its dtype is used for computation.
        down: Matrix V of each layer, or nothing if matrices have full rank, which replaces V x by x.
        up: Matrix U of each layer. Parameters are cast to the dtype of x0, and their gradients have their own dtype.
        biases: Bias b of each layer.

    Returns:
        Output of the last layer, differentiable once. On a CPU it is bitwise identical for any number of threads. In
        torch.export, this is plain PyTorch.
    """
    is_fused = x0.device.type == "cuda" and x0.dtype in DTYPE_CODES and x0.numel() > 0 and len(up) > 0
    if is_fused and not torch.compiler.is_exporting():
        result: Tensor = GpuCrossNetwork.apply(x0, len(up), *down, *up, *biases)
        return result
    x = x0
    for layer, (weight, bias) in enumerate(zip(up, biases, strict=True)):
        inputs = mlp(x, [down[layer]], [None], relu_last=False) if down else x
        x = add_product(x, x0, mlp(inputs, [weight], [bias], relu_last=False))
    return x


class GpuCrossNetwork(torch.autograd.Function):
    """Cross network, with the arguments (x0, number of layers, *down, *up, *biases)."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:
        *down, up, biases = _by_layer(cast_all(parameters, x0.dtype), num_layers)
        x = x0 = x0.contiguous()
        inputs, inner, products = [], [], []
        for layer in range(num_layers):
            inputs.append(x)
            inner.append(linear(x, down[0][layer], None) if down else x)
            x, product = linear_cross(inner[layer], up[layer], biases[layer], x0, x)
            products.append(product)
        ctx.save_for_backward(*inputs, *products, *up, *([*inner, *down[0]] if down else []))
        ctx.num_layers, ctx.dtypes = num_layers, [parameter.dtype for parameter in parameters]
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        num_layers = ctx.num_layers
        inputs, products, up, *factors = _by_layer(ctx.saved_tensors, num_layers)
        inner, down = factors or (inputs, ())
        x0 = inputs[0]
        x0_gradient = torch.empty_like(x0)
        sums = new_block_sums(x0, num_layers * x0.shape[1]).view(num_layers, -1, x0.shape[1])
        up_gradients: list[Any] = [None] * num_layers
        down_gradients: list[Any] = [None] * len(down)
        for layer in reversed(range(num_layers)):
            upper = _cross_backward(
                gradient, x0, products[layer], x0_gradient, sums[layer], layer == num_layers - 1, layer == 0
            )
            weight, weight_gradients = up[layer], up_gradients
            if down:
                upper, up_gradients[layer] = linear_backward(upper, inner[layer], weight)
                weight, weight_gradients = down[layer], down_gradients
            gradient, weight_gradients[layer] = linear_backward(
                upper,
                inputs[layer],
                weight,
                needs_input=layer > 0 or ctx.needs_input_grad[0],
                # In the first layer x is x0, and `x0_gradient` contains the gradient of x.
                residual=gradient if layer else x0_gradient,
            )
        totals = sums[:, 0] if sums.shape[1] == 1 else sums.sum(dim=1)
        gradients = zip([*down_gradients, *up_gradients, *totals], ctx.dtypes, strict=True)
        return gradient, None, *(one.to(dtype) for one, dtype in gradients)


def _by_layer(tensors: Sequence[Tensor], num_layers: int) -> list[Sequence[Tensor]]:
    """Divide tensors into groups with one tensor per layer."""
    return [tensors[first : first + num_layers] for first in range(0, len(tensors), num_layers)]


def _cross_backward_gpu(*arguments: Any) -> Tensor:
    from meseta.ops.cross_network import triton

    return triton.cross_backward(*arguments)


_cross_backward = register(
    "cross_backward(Tensor gradient, Tensor x0, Tensor product, Tensor(a!) x0_gradient, Tensor(b!) sums, bool is_last, "
    "bool is_first) -> Tensor",
    cpu=reference.cross_backward,
    cuda=_cross_backward_gpu,
    fake=lambda gradient, x0, *rest: x0.new_empty(x0.shape),
)
