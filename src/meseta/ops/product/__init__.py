"""Products of matrices that have the same bits for any number of threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meseta.jagged.shapes import Float
from meseta.machine.processors import read_processor
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.memory import empty
from meseta.ops.product import reference
from meseta.spec import MesetaError

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Types of the compiled kernel, with its numbers for them."""
MAX_TERMS = 16384
"""Terms that oneDNN adds up in one product: of 20,000 it gives some to each thread."""
MIN_ITEMS_FOR_BMM = 64
"""Products of a batch that libraries give to a thread each; of fewer they cut the products themselves."""


def product(
    a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "M N"]:
    """a b + bias, in the type of all three; on a CPU with the same bits for any number of threads. Not differentiable.

    Float32, and bfloat16 where the processor multiplies it, go to oneDNN, whose kernels for AVX2 and AVX-512 leave a
    sum to one thread, but for one row and, in float32, for very many terms: torch's road to MKL does not, for any type,
    nor do all products that torch gives to oneDNN by itself. What is left takes a kernel of the compiled core, float64
    always. Not held: bfloat16 with AMX, see `Processor.thread_dependence_reason`. The matrices may lie in any order;
    for one row b is best contiguous, else a.
    """
    if a.device.type != "cpu" or a.numel() == 0 or b.numel() == 0:
        return reference.product(a, b, bias)
    if len(a) > 1:
        if a.dtype == torch.float32 and _onednn_has_kernels():
            return _onednn_product(a, b, bias)
        if a.dtype == torch.bfloat16 and _onednn_has_bfloat16():
            # Where the bits follow the threads on both roads, the faster one.
            return reference.product(a, b, bias) if _bits_depend_on_threads() else _linear(a, b, bias)
    result: Tensor = _operator(a[None], b[None], bias)
    return result[0]


def batched_product(a: Float[Tensor, "B M K"], b: Float[Tensor, "B K N"]) -> Float[Tensor, "B M N"]:
    """a b for every item, differentiable once; on a CPU with the same bits for any number of threads."""
    # A program that is exported takes any batch; asking for the length of this one would fix it.
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
    """Whether torch has oneDNN's linear layer, and oneDNN its kernels of AVX2: those below it cut sums by threads.

    MKL's products, which torch takes by itself for float32, came to 32.7 ms a step of DLRM 512-256-64-16 and 512-256-1
    with 2048 samples on two cores of an AMD EPYC, and oneDNN's to 28.2.
    """
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and read_processor().instruction_set() in {"AVX2", "AVX-512", "AVX-512 BF16", "AMX"}
    )


@cache
def _onednn_has_bfloat16() -> bool:
    """Whether torch has oneDNN's linear layer, and oneDNN multiplies bfloat16 here."""
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
    # Of a part of the columns of a wider matrix oneDNN takes its reference: 3,393 ms where this takes 16.
    weight = b.t() if b.is_contiguous() else b.t().contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a.contiguous(), weight, bias, "none", [], "")
    return out


def _product_cpu(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dim() != 3 or b.dim() != 3 or (len(a), a.shape[2]) != tuple(b.shape[:2]):
        raise MesetaError(f"product: {tuple(a.shape)} times {tuple(b.shape)}; give [B, M, K] and [B, K, N]")
    if bias is not None and bias.shape != b.shape[2:]:
        raise MesetaError(f"product: a bias {tuple(bias.shape)} for {b.shape[2]} columns; give one number for each")
    if b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        raise MesetaError(
            f"product: {a.dtype} times {b.dtype}, bias {None if bias is None else bias.dtype}; give one type"
        )
    if not a.is_floating_point():
        raise MesetaError(f"product: matrices of {a.dtype}; give a floating-point type")
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
