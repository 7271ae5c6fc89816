"""Triton kernels of the dense part of a model, for `triton_compile.py`."""

from __future__ import annotations

from typing import Any

from meseta.ops.concat import triton as concat
from meseta.ops.cross_entropy import triton as cross_entropy
from meseta.ops.cross_network import triton as cross_network
from meseta.ops.dot_interaction import triton as dot_interaction
from meseta.ops.linear import triton as linear
from meseta.ops.mlp import triton as mlp

Kernels = dict[str, tuple[Any, dict[str, Any]]]
WORDS, FLOATS = "*i64", "*fp32"


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
            (cross_entropy._scale_gradients, {"scale": "*fp64", "factor": None}),
            (cross_entropy._finish_step, {"scale": "*fp64", "memory": WORDS, "report": WORDS}),
        ]
        if dtype != "*fp64":  # Other products are those of plain PyTorch.
            pooled = {"pooled": FLOATS, "pooled_gradient": FLOATS, "enable_fp_fusion": True, **dot_interaction.OPTIONS}
            for num_features, dim in ((7, 16), (26, 16), (26, 64), (100, 128)):
                shape = pooled | {"FEATURES": num_features, "DIM": dim}
                for kernel in (dot_interaction._multiply_pairs, dot_interaction._sum_scaled_vectors):
                    kernels[f"{kernel.__name__} {dtype} {num_features} x {dim}"] = (kernel, common | shape)
        for kernel, types in cases:
            kernels[f"{kernel.__name__} {dtype}"] = (kernel, common | types)
        # Columns of DLRM-DCNv2 with 26 tables of 16 columns.
        columns = dict.fromkeys(("product_gradient", "x0_gradient", "x0", "product"), dtype)
        for position, flags in (("inner", 0), ("only", 3)):
            form = {"FORM": 4 * 432 + flags}
            kernels[f"cross {dtype} {position}"] = (cross_network._cross_backward, common | columns | form)
        kernels[f"concat {dtype}"] = (concat._concat, common | {"a": dtype, "b": FLOATS, "LEFT": 16, "RIGHT": 416})
    return kernels


GROUPS = {"dense": dense}
