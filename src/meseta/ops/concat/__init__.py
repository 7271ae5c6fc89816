"""Concatenation of columns in one dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.ops.common import register
from meseta.ops.concat import reference
from meseta.sparse.shapes import Float


def concat(a: Float[Tensor, "B N"], b: Float[Tensor, "B M"], dtype: torch.dtype) -> Float[Tensor, "B N_plus_M"]:
    """Return the columns of `a` and `b` in `dtype`. Gradients have the dtypes of the inputs.

    On a GPU, casting and concatenating take one kernel. Differentiable once if a dtype changes there.
    """
    is_cast = a.dtype != dtype or b.dtype != dtype
    if not is_cast or a.device.type != "cuda" or torch.compiler.is_exporting():
        return reference.concat(a, b, dtype)
    result: Tensor = _Concatenation.apply(a, b, dtype)
    return result


class _Concatenation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.width, ctx.dtypes = a.shape[1], (a.dtype, b.dtype)
        result: Tensor = _operator(a, b, dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient[:, : ctx.width], gradient[:, ctx.width :]
        needed = zip(parts, ctx.dtypes, ctx.needs_input_grad, strict=False)
        return *(part.to(dtype) if is_needed else None for part, dtype, is_needed in needed), None


def _concat_gpu(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.shape[0] == 0 or a.shape[1] + b.shape[1] == 0:
        return reference.concat(a, b, dtype)
    from meseta.ops.concat import triton

    return triton.concat(a, b, dtype)


_operator = register(
    "concat(Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    cpu=reference.concat,
    cuda=_concat_gpu,
    fake=lambda a, b, dtype: a.new_empty(a.shape[0], a.shape[1] + b.shape[1], dtype=dtype),
)
