"""Speed of fused linear layers relative to cuBLAS with element-wise kernels, for the limits of `meseta.ops.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common.device_rates import device_seconds
from torch import Tensor

from gpu_parts.rows import RowWriter
from meseta.ops.linear import mask_and_sum, new_block_sums
from meseta.ops.product import product

CASES = (
    (torch.float32, (256, 432, 512)),
    (torch.float32, (2048, 432, 512)),
    (torch.bfloat16, (2048, 432, 512)),
    (torch.bfloat16, (55_296, 512, 3456)),
    (torch.bfloat16, (55_296, 3456, 1024)),
)
"""Data types and (samples, inputs, outputs) of layers on both sides of the limits."""


def check(rows: RowWriter) -> None:
    for dtype, sizes in CASES:
        compare(rows, sizes, dtype, "cuda")
        torch.cuda.empty_cache()


def compare(rows: RowWriter, sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Add the speed of the fused forward pass, cross layer and backward pass of a layer."""
    num_samples, num_inputs, num_outputs = sizes
    for name, (fused, plain) in make_pairs(sizes, dtype, device).items():
        fused_s, plain_s = device_seconds(fused, device), device_seconds(plain, device)
        quantity = f"{name}, {num_samples:,} x {num_inputs} to {num_outputs}, {str(dtype).removeprefix('torch.')}"
        unit = f"x cuBLAS ({1e3 * fused_s:.3f} and {1e3 * plain_s:.3f} ms)"
        rows.measured(quantity, plain_s / fused_s, unit)


def make_pairs(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: str
) -> dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]]:
    """Return (fused, plain) functions by name, with equal results for any argument."""
    from meseta.ops.linear import triton

    num_samples, num_inputs, num_outputs = sizes

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, weight, bias = make(num_samples, num_inputs), make(num_outputs, num_inputs), make(num_outputs)
    x0, residual, gradient = (make(num_samples, num_outputs) for _ in range(3))
    sums = new_block_sums(gradient, num_inputs)

    def plain_cross(_: int) -> Any:
        p = product(x, weight.t(), bias)
        return torch.addcmul(residual, x0, p), p

    def plain_backward(_: int) -> Any:
        # The sums of cuBLAS are float32 for both types.
        options = {"out_dtype": torch.float32} if dtype == torch.bfloat16 else {}
        weight_gradient = torch.mm(gradient.t(), x, **options)
        return mask_and_sum(product(gradient, weight), x, sums, 0), weight_gradient

    return {
        "linear with ReLU": (
            lambda _: triton.linear(x, weight, bias, True),
            lambda _: product(x, weight.t(), bias).relu_(),
        ),
        "linear with cross": (lambda _: triton.linear_cross(x, weight, bias, x0, residual), plain_cross),
        "backward with ReLU": (
            lambda _: triton.linear_backward(gradient, x, weight, True, x, None, sums, 0),
            plain_backward,
        ),
    }
