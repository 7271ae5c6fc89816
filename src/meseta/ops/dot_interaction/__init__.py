"""Dot products of all pairs of vectors of a sample, the interaction of DLRM (arXiv 1906.00091, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meseta.ops.common import LIBRARY, register
from meseta.ops.core import core
from meseta.ops.dot_interaction import reference
from meseta.ops.memory import empty
from meseta.ops.product import batched_product
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


def dot_interaction(x: Float[Tensor, "B D"], pooled: Float[Tensor, "B F_times_D"]) -> Float[Tensor, "B D_plus_P"]:
    """Return x followed by the dot products of all pairs of (x, e_1, ..., e_F), F (F + 1) / 2 per sample.

    The products are the lower triangle without its diagonal, row by row: <e_1, x>, <e_2, x>, <e_2, e_1>, <e_3, x> and
    so on. Differentiable once. Exported programs contain plain PyTorch operators.

    Args:
        x: Dense vectors, whose dtype the result has.
        pooled: Concatenated vectors e_1 to e_F. With bfloat16 x and float32 `pooled`, computation is in float32 and
            only the result is rounded.

    Raises:
        MesetaError: `pooled` is not a whole number of vectors as wide as x, or has another number of samples.
    """
    _check(x, pooled)
    return reference.dot_interaction(x, pooled) if torch.compiler.is_exporting() else _forward(x, pooled)


def _has_kernel(x: Tensor, pooled: Tensor) -> bool:
    return pooled.dtype == torch.float32 and x.dtype in {torch.float32, torch.bfloat16}


def _check(x: Tensor, pooled: Tensor) -> None:
    fits = x.dim() == pooled.dim() == 2 and x.shape[0] == pooled.shape[0] and x.shape[1] > 0
    if not fits or pooled.shape[1] % x.shape[1]:
        raise MesetaError(
            f"dot_interaction: pooled is {tuple(pooled.shape)}, which is not a whole number of vectors for each sample "
            f"of x, {tuple(x.shape)}; pass [B, D] and [B, F * D]"
        )
    if not (x.is_floating_point() and pooled.is_floating_point()):
        raise MesetaError(f"dot_interaction: x is {x.dtype} and pooled {pooled.dtype}; pass floating-point tensors")


def _output_width(x: Tensor, pooled: Tensor) -> Any:
    num_features = pooled.shape[1] // x.shape[1]
    return x.shape[1] + num_features * (num_features + 1) // 2


def _flops(x: Tensor, pooled: Tensor) -> int:
    """Count operations. The kernel multiplies each pair once, plain PyTorch all vectors with all."""
    num_vectors = pooled.shape[1] // x.shape[1] + 1
    pairs = num_vectors * (num_vectors - 1) // 2 if _has_kernel(x, pooled) else num_vectors**2
    return 2 * pairs * x.numel()


def _forward_cpu(x: Tensor, pooled: Tensor) -> Tensor:
    _check(x, pooled)
    if not _has_kernel(x, pooled):
        return reference.dot_interaction(x, pooled, batched_product)
    x, pooled = x.contiguous(), pooled.contiguous()
    out = empty((x.shape[0], _output_width(x, pooled)), x.dtype)
    core().dot_interaction(
        x.shape[0],
        pooled.shape[1] // x.shape[1],
        x.shape[1],
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        pooled.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _check_gradient(gradient: Tensor, x: Tensor, pooled: Tensor) -> None:
    _check(x, pooled)
    if gradient.shape != (x.shape[0], _output_width(x, pooled)) or gradient.dtype != x.dtype:
        raise MesetaError(
            f"dot_interaction_backward: the gradient is {gradient.dtype} {tuple(gradient.shape)}, but the result was "
            f"{x.dtype} {(x.shape[0], _output_width(x, pooled))}; pass the same dtype and shape"
        )


def _backward_cpu(gradient: Tensor, x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    _check_gradient(gradient, x, pooled)
    if not _has_kernel(x, pooled):
        return reference.dot_interaction_backward(gradient, x, pooled, batched_product)
    gradient, x, pooled = gradient.contiguous(), x.contiguous(), pooled.contiguous()
    x_gradient, pooled_gradient = torch.empty_like(x), empty(pooled.shape, pooled.dtype)
    core().dot_interaction_backward(
        x.shape[0],
        pooled.shape[1] // x.shape[1],
        x.shape[1],
        x.dtype == torch.bfloat16,
        gradient.data_ptr(),
        x.data_ptr(),
        pooled.data_ptr(),
        x_gradient.data_ptr(),
        pooled_gradient.data_ptr(),
        torch.get_num_threads(),
    )
    return x_gradient, pooled_gradient


def _forward_gpu(x: Tensor, pooled: Tensor) -> Tensor:
    _check(x, pooled)
    if not _has_kernel(x, pooled):
        return reference.dot_interaction(x, pooled)
    from meseta.ops.dot_interaction import triton

    return triton.dot_interaction(x, pooled)


def _backward_gpu(gradient: Tensor, x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    _check_gradient(gradient, x, pooled)
    if not _has_kernel(x, pooled):
        return reference.dot_interaction_backward(gradient, x, pooled)
    from meseta.ops.dot_interaction import triton

    return triton.dot_interaction_backward(gradient, x, pooled)


_forward = register(
    "dot_interaction(Tensor x, Tensor pooled) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=lambda x, pooled: x.new_empty(x.shape[0], _output_width(x, pooled)),
    flops=_flops,
)
_backward = register(
    "dot_interaction_backward(Tensor gradient, Tensor x, Tensor pooled) -> (Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_gpu,
    fake=lambda gradient, x, pooled: (x.new_empty(x.shape), pooled.new_empty(pooled.shape)),
    # The kernel multiplies both vectors of each pair. Plain PyTorch adds the transpose to the gradients of all products
    # first, and then needs one product.
    flops=lambda gradient, x, pooled: _flops(x, pooled) * (2 if _has_kernel(x, pooled) else 1),
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_call(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _backward(gradient, *ctx.saved_tensors)
    return result


torch.library.register_autograd("meseta::dot_interaction", _backward_of_call, setup_context=_setup_context, lib=LIBRARY)
