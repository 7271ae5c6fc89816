"""Matrix products that are bitwise identical for any number of threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.ops.common import register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.product import reference
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError
from meseta.system.processors import read_processor

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Codes by which the compiled kernel identifies dtypes."""
MAX_TERMS = 16384
"""Maximum number of terms per oneDNN product. oneDNN splits sums of 20,000 terms between threads."""
MIN_ITEMS_FOR_BMM = 64
"""Minimum batch size for `torch.bmm`. Libraries split the products of smaller batches between threads."""


def product(
    a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "M N"]:
    """Return a b + bias, all of one dtype. Not differentiable.

    On a CPU the result is bitwise identical for any number of threads, except for bfloat16 with AMX, see
    `Processor.thread_dependence_reason`. Matrices may have any strides. For a single row a contiguous b is fastest,
    otherwise a contiguous a.
    """
    # float32 uses oneDNN, and so does bfloat16 if the processor supports it. The AVX2 and AVX-512 kernels compute a sum
    # in one thread, except for a single row and, in float32, for very many terms. MKL does not, which is torch's
    # default, and neither do all products that torch passes to oneDNN. Float64 and the remaining cases use a kernel of
    # the compiled core.
    if a.device.type != "cpu" or a.numel() == 0 or b.numel() == 0:
        return reference.product(a, b, bias)
    if len(a) > 1:
        if a.dtype == torch.float32 and _onednn_has_kernels():
            return _onednn_product(a, b, bias)
        if a.dtype == torch.bfloat16 and _onednn_has_bfloat16():
            # If the bits depend on threads in both implementations, use the faster one.
            return reference.product(a, b, bias) if _bits_depend_on_threads() else _linear(a, b, bias)
    result: Tensor = _operator(a[None], b[None], bias)
    return result[0]


def batched_product(a: Float[Tensor, "B M K"], b: Float[Tensor, "B K N"]) -> Float[Tensor, "B M N"]:
    """Return a b for each item, differentiable once. On a CPU it is bitwise identical for any number of threads."""
    # Reading the batch size would fix it in an exported program.
    if torch.compiler.is_exporting() or a.device.type != "cpu" or len(a) >= MIN_ITEMS_FOR_BMM:
        return torch.bmm(a, b)
    result: Tensor = _BatchedProduct.apply(a, b)
    return result


class _BatchedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        result: Tensor = _operator(a, b, None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _operator(gradient, b.transpose(1, 2), None), _operator(a.transpose(1, 2), gradient, None)


@cache
def _onednn_has_kernels() -> bool:
    """Whether torch has the linear layer of oneDNN, and the processor has AVX2. Older kernels split sums by threads."""
    # 2048 samples through DLRM 512-256-64-16 and 512-256-1 took 28.2 ms per step with oneDNN, and 32.7 ms with MKL,
    # torch's default for float32, on two cores of an AMD EPYC.
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and read_processor().instruction_set() in {"AVX2", "AVX-512", "AVX-512 BF16", "AMX"}
    )


@cache
def _onednn_has_bfloat16() -> bool:
    """Whether torch has the linear layer of oneDNN, and oneDNN multiplies bfloat16 on this processor."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and read_processor().bfloat16_unavailable_reason() is None
    )


@cache
def _bits_depend_on_threads() -> bool:
    return read_processor().thread_dependence_reason() is not None


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    out = _linear(a[:, :MAX_TERMS], b[:MAX_TERMS], bias)
    for first in range(MAX_TERMS, a.shape[1], MAX_TERMS):
        terms = slice(first, first + MAX_TERMS)
        out += _linear(a[:, terms], b[terms], None)
    return out


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN uses its slow reference for some columns of a wider matrix: 3,393 ms instead of 16 ms.
    weight = b.t() if b.is_contiguous() else b.t().contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a.contiguous(), weight, bias, "none", [], "")
    return out


def _product_cpu(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dim() != 3 or b.dim() != 3 or (len(a), a.shape[2]) != tuple(b.shape[:2]):
        raise MesetaError(f"product: {tuple(a.shape)} times {tuple(b.shape)}; pass [B, M, K] and [B, K, N]")
    if bias is not None and bias.shape != b.shape[2:]:
        raise MesetaError(f"product: bias {tuple(bias.shape)} for {b.shape[2]} columns; pass one number per column")
    if b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        raise MesetaError(
            f"product: {a.dtype} times {b.dtype}, bias {None if bias is None else bias.dtype}; pass equal dtypes"
        )
    if not a.is_floating_point():
        raise MesetaError(f"product: matrices of {a.dtype}; pass a floating-point dtype")
    if a.dtype not in DTYPE_CODES:
        return reference.batched_product(a, b, bias)
    bias = None if bias is None else bias.contiguous()
    out = empty((len(a), a.shape[1], b.shape[2]), a.dtype)
    core().product(
        DTYPE_CODES[a.dtype],
        [*out.shape, a.shape[2]],
        [a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()],
        a.stride(),
        b.stride(),
        torch.get_num_threads(),
    )
    return out


_operator = register(
    "product(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    cpu=_product_cpu,
    cuda=reference.batched_product,
    fake=lambda a, b, bias: a.new_empty(a.shape[0], a.shape[1], b.shape[2]),
    flops=lambda a, b, bias: 2 * a.numel() * b.shape[2],
)
