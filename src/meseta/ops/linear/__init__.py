"""Linear layers on a GPU, with the element-wise operations next to each product in its kernel. Not differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meseta.ops.common import register
from meseta.ops.linear import reference
from meseta.ops.linear.reference import new_block_sums as new_block_sums
from meseta.ops.product import product
from meseta.sparse.shapes import Float

MAX_FUSED_FLOPS = 50_000_000
"""Maximum number of operations of a product that is computed in one launch with the other steps of a layer."""
# In float32 these launches use CUDA cores. The terms of x and W are contiguous, so that threads read the same banks of
# shared memory: perhaps 12 TFLOP/s on an H100, where cuBLAS has 50. 50 MFLOP take 3 us longer. This is the time to
# launch the kernels that they replace.
MAX_FUSED_TERMS = 1024
"""Maximum number of terms of a sum of such a product."""
# One program computes a sum, so that long sums take long if there are few of them. With bfloat16, products with fewer
# terms are fused at any size: with tensor cores at 550 TFLOP/s, where cuBLAS has 700, an element with 1,024 terms takes
# 0.8 ps longer. Reading and writing it once more takes 1 ps at 4 TB/s.


def linear(
    x: Float[Tensor, "B N"], weight: Float[Tensor, "M N"], bias: Float[Tensor, " M"] | None, *, relu: bool = False
) -> Float[Tensor, "B M"]:
    """Return x W^T + b, after a ReLU if `relu`. NaN passes the ReLU. All tensors have one dtype."""
    result: Tensor = _linear(x, weight, bias, relu)
    return result


def linear_cross(
    t: Float[Tensor, "B R"],
    weight: Float[Tensor, "N R"],
    bias: Float[Tensor, " N"] | None,
    x0: Float[Tensor, "B N"],
    x: Float[Tensor, "B N"],
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Return (x + x0 * p, p) with p = t W^T + b: the last steps of a cross layer (arXiv 2008.13535, section 3).

    All tensors have one dtype. With bfloat16, p is rounded before it is used.
    """
    out, p = _linear_cross(t, weight, bias, x0, x)
    return out, p


def linear_backward(
    gradient: Float[Tensor, "B M"],
    x: Float[Tensor, "B N"],
    weight: Float[Tensor, "M N"],
    *,
    needs_input: bool = True,
    mask: Float[Tensor, "B N"] | None = None,
    residual: Float[Tensor, "B N"] | None = None,
    sums: Float[Tensor, "blocks width"] | None = None,
    column: int = 0,
) -> tuple[Float[Tensor, "B N"] | None, Float[Tensor, "M N"]]:
    """Return the gradients of input and weight of a linear layer, G W and G^T x.

    Args:
        gradient: Gradient G of the output x W^T + b.
        x: Input of the layer.
        weight: Weight W, of the dtype of x.
        needs_input: Whether the gradient of the input is computed. Otherwise it is `None`.
        mask: Output of the ReLU before this layer. The gradient of the input is 0 unless `mask` > 0.
        residual: Added to the gradient of the input, before the mask.
        sums: Required with `mask`. Sums of the masked gradient over blocks of samples, see `new_block_sums`, are
            written to N columns from `column` on.
        column: First of these columns.

    Returns:
        The gradient of the input in the dtype of x, and that of the weight in float32, or for float64 in float64.
    """
    x_gradient, weight_gradient = _linear_backward(gradient, x, weight, needs_input, mask, residual, sums, column)
    return x_gradient if needs_input else None, weight_gradient


def mask_and_sum(
    gradient: Float[Tensor, "B N"], output: Float[Tensor, "B N"], sums: Float[Tensor, "blocks width"], column: int
) -> Float[Tensor, "B N"]:
    """Return the gradient before a ReLU with `output`. Its block sums are written to N columns from `column` on."""
    result: Tensor = _mask_and_sum(gradient, output, sums, column)
    return result


def _is_small(num_samples: int, num_inputs: int, num_outputs: int) -> bool:
    return 0 < 2 * num_samples * num_inputs * num_outputs <= MAX_FUSED_FLOPS


def _has_fused_product(x: Tensor, num_terms: int, num_outputs: int) -> bool:
    """Whether Triton multiplies x with a matrix [num_terms, num_outputs]."""
    if num_terms > MAX_FUSED_TERMS or not len(x):
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _is_small(len(x), num_terms, num_outputs))


def _linear_gpu(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    if _has_fused_product(x, x.shape[1], len(weight)):
        from meseta.ops.linear import triton

        return triton.linear(x, weight, bias, relu)
    out = product(x, weight.t(), bias)
    # cuBLASLt could fuse the ReLU, but its ReLU turns NaN into 0, and training would continue unnoticed.
    return out.relu_() if relu else out


def _linear_cross_gpu(t: Tensor, weight: Tensor, bias: Tensor | None, x0: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if _has_fused_product(t, t.shape[1], len(weight)):
        from meseta.ops.linear import triton

        return triton.linear_cross(t, weight, bias, x0, x)
    p = product(t, weight.t(), bias)
    return torch.addcmul(x, x0, p), p


def _linear_backward_gpu(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    needs_input: bool,
    mask: Tensor | None,
    residual: Tensor | None,
    sums: Tensor | None,
    column: int,
) -> tuple[Tensor, Tensor]:
    from meseta.ops.linear import triton

    has_fused_input = _has_fused_product(gradient, len(weight), x.shape[1])
    has_fused_weight = x.dtype != torch.float64 and _is_small(len(x), x.shape[1], len(weight))
    if has_fused_weight and (has_fused_input or not needs_input):
        return triton.linear_backward(gradient, x, weight, needs_input, mask, residual, sums, column)
    weight_gradient = _weight_gradient(gradient, x)
    if not needs_input:
        return gradient.new_empty(0, 0), weight_gradient
    # A product without mask and residual is faster in cuBLAS. `addmm` copies the residual before cuBLAS adds to it.
    if has_fused_input and (mask is not None or residual is not None):
        return triton.input_gradient(gradient, x, weight, mask, residual, sums, column), weight_gradient
    result = product(gradient, weight) if residual is None else torch.addmm(residual, gradient, weight)
    return result if mask is None else _mask_and_sum(result, mask, sums, column), weight_gradient


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the sums of products in their own dtype. The sums of cuBLAS are float32 for bfloat16 matrices too."""
    if gradient.dtype == torch.bfloat16:
        return torch.mm(gradient.t(), x, out_dtype=torch.float32)
    return product(gradient.t(), x)


def _mask_and_sum_gpu(*arguments: Any) -> Tensor:
    from meseta.ops.linear import triton

    return triton.mask_and_sum(*arguments)


_linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias, bool relu) -> Tensor",
    cpu=reference.linear,
    cuda=_linear_gpu,
    fake=lambda x, weight, bias, relu: x.new_empty(x.shape[0], weight.shape[0]),
    flops=lambda x, weight, bias, relu: 2 * x.numel() * weight.shape[0],
)
_linear_cross = register(
    "linear_cross(Tensor t, Tensor weight, Tensor? bias, Tensor x0, Tensor x) -> (Tensor, Tensor)",
    cpu=reference.linear_cross,
    cuda=_linear_cross_gpu,
    fake=lambda t, weight, bias, x0, x: (x.new_empty(x.shape), x.new_empty(x.shape)),
    flops=lambda t, weight, bias, x0, x: 2 * t.numel() * weight.shape[0],
)
_linear_backward = register(
    "linear_backward(Tensor gradient, Tensor x, Tensor weight, bool needs_input, Tensor? mask, Tensor? residual, "
    "Tensor(a!)? sums, int column) -> (Tensor, Tensor)",
    cpu=reference.linear_backward,
    cuda=_linear_backward_gpu,
    fake=lambda gradient, x, weight, needs_input, *rest: (
        gradient.new_empty(x.shape if needs_input else (0, 0)),
        weight.new_empty(weight.shape, dtype=reference.sum_dtype(gradient)),
    ),
    flops=lambda gradient, x, weight, needs_input, *rest: 2 * gradient.numel() * x.shape[1] * (1 + needs_input),
)
_mask_and_sum = register(
    "mask_and_sum(Tensor gradient, Tensor output, Tensor(a!) sums, int column) -> Tensor",
    cpu=reference.mask_and_sum,
    cuda=_mask_and_sum_gpu,
    fake=lambda gradient, output, sums, column: gradient.new_empty(gradient.shape),
)
