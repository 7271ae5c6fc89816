"""Triton kernels of the dense part of a model, for `triton_compile.py`."""

from __future__ import annotations

from typing import Any

from meseta.ops.cross_entropy import triton as cross_entropy
from meseta.ops.dot_interaction import triton as dot_interaction
from meseta.ops.linear import triton as linear
from meseta.ops.mlp import triton as mlp

Kernels = dict[str, tuple[Any, dict[str, Any]]]
FLOATS = "*fp32"


def dense() -> Kernels:
    sizes = dict.fromkeys(("num_samples", "num_logits", "stride", "gradient_stride"), "i32")
    names = ("x", "out", "x_gradient", "gradient", "output", "masked", "logits", "label", "factor", "weight", "bias")
    kernels: Kernels = {}
    for dtype in ("*fp32", "*bf16", "*fp64"):
        common = sizes | dict.fromkeys(names, dtype) | {"sums": "*fp64" if dtype == "*fp64" else FLOATS}
        cases: list[tuple[Any, dict[str, Any]]] = [
            (linear._mask_and_sum, {"WIDTH": 512}),
            (mlp._scalar_linear, {"WIDTH": 250, "RELU": True}),
            (mlp._scalar_linear_backward, {"FORM": 2 * 250 + 1}),
            (cross_entropy._sum_losses, {"sums": "*fp64"}),
            (cross_entropy._scale_gradients, {"gradient": "*fp64", "factor": None}),
        ]
        if dtype != "*fp64":  # Other products are those of plain PyTorch.
            pooled = {"pooled": FLOATS, "pooled_gradient": FLOATS}
            for shape in ({"FEATURES": 7, "DIM": 16}, {"FEATURES": 100, "DIM": 128}):
                cases += [(dot_interaction._multiply_pairs, pooled | shape)]
                cases += [(dot_interaction._sum_scaled_vectors, pooled | shape)]
        for kernel, types in cases:
            kernels[f"{kernel.__name__} {dtype} {types.get('DIM')}"] = (kernel, common | types)
    return kernels


GROUPS = {"dense": dense}
