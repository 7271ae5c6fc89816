"""Stack of linear layers with ReLU. The whole stack is one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.ops.common import register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.mlp import reference
from meseta.ops.mlp.gpu import GpuMlp
from meseta.ops.product import DTYPE_CODES, product
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


def mlp(
    x: Float[Tensor, "B N"],
    weights: Sequence[Float[Tensor, "_outputs _inputs"]],
    biases: Sequence[Float[Tensor, " _outputs"] | None],
    *,
    relu_last: bool,
) -> Float[Tensor, "B outputs"]:
    """Apply linear layers with ReLU between them: x W_1^T + b_1, ReLU, and so on.

    Args:
        x: Input. Its dtype is used for computation. NaN stays NaN.
        weights: Weight of each layer. Parameters are cast to the dtype of x, and their gradients have their own dtype.
        biases: Bias of each layer, or None.
        relu_last: Whether ReLU follows the last layer.

    Returns:
        Output of the last layer, differentiable once. On a CPU it is bitwise identical for any number of threads. In
        torch.export, this is plain PyTorch.
    """
    # The CPU backward computes ReLU, the bias gradient and the transpose for the weight gradient in one pass.
    # On the meta device, run the CPU implementation, so that shapes of a step are those of the CPU.
    compiled = x.device.type in {"cpu", "meta", "cuda"} and x.dtype in DTYPE_CODES and weights
    if not compiled or torch.compiler.is_exporting() or x.numel() == 0:
        return reference.mlp(x, weights, biases, relu_last=relu_last)
    function = GpuMlp if x.device.type == "cuda" else _Mlp
    result: Tensor = function.apply(x, relu_last, *weights, *biases)
    return result


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relu_last: bool, *parameters: Any) -> Tensor:
        depth = len(parameters) // 2
        weights = [weight.to(x.dtype) for weight in parameters[:depth]]
        outputs = [x.contiguous()]
        for index, (weight, bias) in enumerate(zip(weights, parameters[depth:], strict=True)):
            relu = relu_last or index < depth - 1
            output = product(outputs[-1], weight.t(), None if bias is None else bias.to(x.dtype))
            # oneDNN could fuse the ReLU, but its ReLU turns NaN into 0, and training would continue unnoticed.
            outputs.append(output.relu_() if relu else output)
        ctx.save_for_backward(*outputs, *weights)
        ctx.relu_last = relu_last
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.dtypes) // 2
        saved = ctx.saved_tensors  # Unpacked only once, as torch.utils.checkpoint requires.
        outputs, weights = saved[: depth + 1], saved[depth + 1 :]
        weight_gradients: list[Tensor] = []
        bias_gradients: list[Tensor | None] = []
        for index in reversed(range(depth)):
            relu = ctx.relu_last or index < depth - 1
            if relu and index == depth - 1:  # The incoming gradient belongs to autograd and must not be changed.
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            gradient = gradient.contiguous()
            weight_gradient, bias_gradient = _parameter_gradients(
                gradient, outputs[index], outputs[index + 1] if relu else None
            )
            weight_gradients.append(weight_gradient.to(ctx.dtypes[index]))
            bias_dtype = ctx.dtypes[depth + index]
            bias_gradients.append(None if bias_dtype is None else bias_gradient.to(bias_dtype))
            if index or ctx.needs_input_grad[0]:
                gradient = product(gradient, weights[index])
        x_gradient = gradient if ctx.needs_input_grad[0] else None
        return x_gradient, None, *reversed(weight_gradients), *reversed(bias_gradients)


def _parameter_gradients(gradient: Tensor, x: Tensor, output: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias. Overwrites `gradient` with the gradient before the ReLU."""
    transposed, bias_gradient = relu_backward(gradient, output, True)
    return product(transposed, x), bias_gradient


def _relu_backward_cpu(gradient: Tensor, output: Tensor | None, transpose: bool) -> tuple[Tensor, Tensor]:
    fits = output is None or (output.shape == gradient.shape and output.dtype == gradient.dtype)
    if gradient.dim() != 2 or not fits or not gradient.is_contiguous() or not gradient.is_floating_point():
        raise MesetaError(
            f"relu_backward: the gradient is {gradient.dtype} {tuple(gradient.shape)} with strides "
            f"{gradient.stride()}; pass contiguous floats [B, N], and an output of the same dtype and shape"
        )
    if gradient.dtype not in {torch.float32, torch.bfloat16}:
        return reference.relu_backward(gradient, output, transpose)
    output = None if output is None else output.contiguous()
    num_samples, width = gradient.shape
    transposed = empty((width, num_samples) if transpose else (0, 0), gradient.dtype)
    bias_gradient = torch.empty(width)
    core().relu_backward(
        num_samples,
        width,
        gradient.dtype == torch.bfloat16,
        gradient.data_ptr(),
        0 if output is None else output.data_ptr(),
        0 if output is None else gradient.data_ptr(),
        transposed.data_ptr() if transpose else 0,
        bias_gradient.data_ptr(),
        torch.get_num_threads(),
    )
    return transposed, bias_gradient


relu_backward = register(
    "relu_backward(Tensor(a!) gradient, Tensor? output, bool transpose) -> (Tensor, Tensor)",
    cpu=_relu_backward_cpu,
    cuda=reference.relu_backward,
    fake=lambda gradient, output, transpose: (
        gradient.new_empty((gradient.shape[1], gradient.shape[0]) if transpose else (0, 0)),
        gradient.new_empty(gradient.shape[1], dtype=torch.float32),
    ),
)
