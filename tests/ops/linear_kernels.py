"""Triton kernels of linear layers, for `triton_compile.py`."""

from __future__ import annotations

from typing import Any

import torch

from meseta.ops.linear import triton as linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {"small": (64, 432, 512), "medium": (2048, 448, 640), "large": (55296, 1024, 1024)}
"""Samples, inputs and outputs of a layer. All sizes are multiples of 16 bytes."""


def products() -> dict[str, tuple[Any, dict[str, Any]]]:
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name, shape in SHAPES.items():
        for dtype in DTYPES:
            if dtype == "bf16" or name != "large":  # cuBLAS computes large float32 products.
                kernels |= forward_kernels(f"{dtype} {name}", dtype, *shape)
                kernels |= backward_kernels(f"{dtype} {name}", dtype, *shape)
    # Rows of 13 columns.
    kernels |= forward_kernels("fp32 odd", "fp32", 64, 13, 512, aligned=False)
    return kernels


def forward_kernels(
    name: str, dtype: str, num_samples: int, num_inputs: int, num_outputs: int, *, aligned: bool = True
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the kernels of a layer with ReLU and of the last steps of a cross layer."""
    pointer = f"*{dtype}"
    tile = linear.choose_forward_tile(num_samples, num_outputs, num_inputs, DTYPES[dtype])
    alignment = 16 // DTYPES[dtype].itemsize
    common = {
        "operands": (pointer, pointer, pointer),
        "num_samples": "i32",
        "sizes": ("i32", "i32", "i32"),
        "ALIGNMENTS": (alignment if aligned else 1, alignment),
    }
    relu = {"outputs": (pointer, None), "factors": (None, None), "RELU": True, **tile_options(tile)}
    cross = {"outputs": (pointer, pointer), "factors": (pointer, pointer), "RELU": False}
    cross |= tile_options(linear.limit_rows(tile))
    return {
        f"relu {name}": (linear._linear, common | relu),
        f"cross {name}": (linear._linear, common | cross),
    }


def backward_kernels(
    name: str, dtype: str, num_samples: int, num_inputs: int, num_outputs: int
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the kernels of the gradients, and for a large product of the input gradient only."""
    pointer, kind = f"*{dtype}", DTYPES[dtype]
    is_large = name.endswith("large")
    alignment = 16 // kind.itemsize
    common = {
        "operands": (pointer, pointer, pointer),
        "counts": ("i32", "i32", "i32"),
        "sizes": ("i32", "i32", "i32", "i32"),
        "ALIGNMENTS": (alignment, alignment),
        "WEIGHT_TILE": linear.choose_tile(num_outputs, num_inputs, num_samples, kind)[:3],
    }
    weight_gradient = None if is_large else "*fp32"
    masked = {"outputs": (pointer, weight_gradient, "*fp32"), "terms": (pointer, None)}
    masked |= tile_options(linear.choose_block_tile(num_samples, num_inputs, num_outputs, kind))
    kernels = {f"mask {name}": (linear._linear_backward, common | masked)}
    added = {"outputs": (pointer, weight_gradient, None), "terms": (None, pointer)}
    added |= tile_options(linear.limit_rows(linear.choose_tile(num_samples, num_inputs, num_outputs, kind)))
    kernels[f"residual {name}"] = (linear._linear_backward, common | added)
    if not is_large:
        weight_only = {"outputs": (None, weight_gradient, None), "terms": (None, None)}
        kernels[f"weight {name}"] = (linear._linear_backward, common | added | weight_only)
    return kernels


def tile_options(tile: linear.ProductTile) -> dict[str, Any]:
    options = {"TILE": tile[:3], "num_warps": tile.num_warps, "num_stages": linear.NUM_STAGES}
    # An A100 would spill up to 64 bytes.
    return options | {"architecture": 90} if tile.rows * tile.columns == 256 * 128 else options


GROUPS = {"products": products}
