"""Sums and other reductions that are bitwise identical for any number of threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meseta.sparse.shapes import Float

MAX_SERIAL_TERMS = 16384
"""Maximum number of elements that torch sums to a scalar in one thread. It splits 32,768 elements between threads."""


def total(x: Float[Tensor, " *shape"]) -> Float[Tensor, ""]:
    """Return the sum of all elements. Large tensors are summed in chunks, so that torch uses one thread per chunk."""
    flat = x.reshape(-1)
    while len(flat) > MAX_SERIAL_TERMS:
        flat = torch.stack([piece.sum() for piece in flat.split(MAX_SERIAL_TERMS)])
    return flat.sum()


def column_sums(x: Float[Tensor, "B N"]) -> Float[Tensor, " N"]:
    """Return the sum of each column."""
    # Torch sums each column in one thread, unless there is only one column.
    return total(x)[None] if x.shape[1] == 1 else x.sum(dim=0)


def repeat(x: Float[Tensor, " *shape"], count: int | torch.SymInt) -> Float[Tensor, "_count ..."]:
    """Repeat `x` along a new first dimension. The gradient is summed by `column_sums`. Differentiable once."""
    if torch.compiler.is_exporting():
        return x.expand(count, *x.shape)
    result: Tensor = _Repeat.apply(x, count)
    return result


def softmax(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the softmax over the last dimension. On a CPU it is differentiable once."""
    # The bits of torch's own CPU backward depend on the number of threads.
    if x.device.type != "cpu" or torch.compiler.is_exporting():
        return functional.softmax(x, dim=-1)
    result: Tensor = _Softmax.apply(x)
    return result


def add_product(x: Float[Tensor, "*shape"], a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Tensor:
    """Return x + a * b, bitwise identical to `torch.addcmul`. All shapes must be equal. Differentiable once."""
    # The backward of addcmul also multiplies both gradients by its factor 1, which takes four passes instead of two.
    if torch.compiler.is_exporting():
        return torch.addcmul(x, a, b)
    result: Tensor = _AddProduct.apply(x, a, b)
    return result


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.addcmul(x, a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient, gradient * b, gradient * a


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Any) -> Tensor:
        ctx.shape = x.shape
        return x.expand(count, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return column_sums(gradient.flatten(1)).view(ctx.shape), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = functional.softmax(x, dim=-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        weighted: Tensor = out * gradient
        return weighted.addcmul_(out, weighted.sum(dim=-1, keepdim=True), value=-1)
