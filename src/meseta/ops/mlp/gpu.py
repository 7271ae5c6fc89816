"""`mlp` on a GPU: few kernels per layer, because ReLU and bias gradients are computed together with other steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.ops.common import cast_all, register
from meseta.ops.linear import linear, linear_backward, mask_and_sum, new_block_sums
from meseta.ops.mlp import reference


class GpuMlp(torch.autograd.Function):
    """Stack of linear layers, with the arguments (x, relu_last, *weights, *biases)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu_last: bool, *parameters: Any) -> Tensor:
        depth = len(parameters) // 2
        cast = cast_all(parameters, x.dtype)
        weights, biases = cast[:depth], cast[depth:]
        ctx.ends_in_scalar = not relu_last and len(weights[-1]) == 1
        num_products = depth - ctx.ends_in_scalar
        inputs: list[Tensor] = []
        output = x
        for index in range(num_products):
            inputs.append(output)
            # A last layer with one output applies the ReLU to its input.
            has_relu = relu_last or index < num_products - 1
            output = linear(output, weights[index], biases[index], relu=has_relu)
        if ctx.ends_in_scalar:
            inputs.append(output)
            output = _scalar_linear(output, weights[-1][0], biases[-1], depth > 1)
        ctx.save_for_backward(*inputs, *weights, *([output] if relu_last else []))
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        depth = len(ctx.dtypes) // 2
        saved = ctx.saved_tensors  # Unpacked only once, as torch.utils.checkpoint requires.
        inputs, weights, outputs = saved[:depth], saved[depth : 2 * depth], saved[2 * depth :]
        columns = list(accumulate((len(weight) for weight in weights), initial=0))
        width = columns[-1] + (weights[-1].numel() if ctx.ends_in_scalar else 0)
        sums = new_block_sums(gradient, width)
        weight_gradients: list[Any] = [None] * depth
        bias_gradients: list[Any] = [None] * depth
        num_products = depth - ctx.ends_in_scalar
        if ctx.ends_in_scalar:
            gradient = _scalar_linear_backward(
                gradient, inputs[-1], weights[-1][0], depth > 1, sums, columns[num_products]
            )
        elif outputs:
            gradient = mask_and_sum(gradient, outputs[0], sums, columns[depth - 1])
        elif ctx.dtypes[-1] is not None:
            bias_gradients[-1] = gradient.sum(dim=0, dtype=sums.dtype)
        for index in reversed(range(num_products)):
            gradient, weight_gradients[index] = linear_backward(
                gradient,
                inputs[index],
                weights[index],
                needs_input=index > 0 or ctx.needs_input_grad[0],
                mask=inputs[index] if index else None,
                sums=sums,
                column=columns[index - 1] if index else 0,
            )
        if ctx.ends_in_scalar or outputs or depth > 1:
            totals = sums[0] if len(sums) == 1 else sums.sum(dim=0)
            if ctx.ends_in_scalar:
                weight_gradients[-1] = totals[None, columns[-1] :]
            bias_gradients = [
                totals[columns[index] : columns[index + 1]] if one is None else one
                for index, one in enumerate(bias_gradients)
            ]
        x_gradient = gradient if ctx.needs_input_grad[0] else None
        return x_gradient, None, *_cast([*weight_gradients, *bias_gradients], ctx.dtypes)


def _cast(gradients: Sequence[Any], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Cast gradients to the dtypes of their parameters. A parameter that is `None` has no gradient."""
    return [None if dtype is None else one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True)]


def _scalar_linear_gpu(*arguments: Any) -> Tensor:
    from meseta.ops.mlp import triton

    return triton.scalar_linear(*arguments)


def _scalar_linear_backward_gpu(*arguments: Any) -> Tensor:
    from meseta.ops.mlp import triton

    return triton.scalar_linear_backward(*arguments)


_scalar_linear = register(
    "scalar_linear(Tensor x, Tensor weight, Tensor? bias, bool relu) -> Tensor",
    cpu=reference.scalar_linear,
    cuda=_scalar_linear_gpu,
    fake=lambda x, weight, bias, relu: x.new_empty(x.shape[0], 1),
    flops=lambda x, weight, bias, relu: 2 * x.numel(),
)
_scalar_linear_backward = register(
    "scalar_linear_backward(Tensor gradient, Tensor x, Tensor weight, bool relu, Tensor(a!) sums, int column)"
    " -> Tensor",
    cpu=reference.scalar_linear_backward,
    cuda=_scalar_linear_backward_gpu,
    fake=lambda gradient, x, weight, relu, sums, column: x.new_empty(x.shape),
    flops=lambda gradient, x, weight, relu, sums, column: 4 * x.numel(),
)
