"""Matrix products of GPUs on host memory: in Triton's interpreter, and those of torch that exist only on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_TILE = 256, 512, 512
"""Maximum numbers of rows, columns and terms of a tile in the interpreter."""
TILE_CHOICES = "choose_tile", "choose_forward_tile", "choose_block_tile"
"""Functions of `meseta.ops.linear.triton` that `choose_large_tile` replaces."""
UPDATE_TILE_ELEMENTS = 8192
"""`TILE_ELEMENTS` of `meseta.ops.row_update.triton` in the interpreter."""
LIBRARY = torch.library.Library("aten", "IMPL")
"""Implementations for CPUs of operators that torch has for GPUs only."""


def multiply(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """Implement `tl.dot` in the interpreter, also for bfloat16, whose bits Triton would multiply as integers."""
    from triton.runtime.interpreter import TensorHandle

    products = np.matmul(*(_float_array(one) for one in (a, b)), dtype=total.data.dtype)
    return TensorHandle(products + total.data, total.dtype.scalar)


def _float_array(matrix: Any) -> Any:
    if matrix.dtype.scalar.name != "bf16":
        return matrix.data
    return (matrix.data.astype(np.uint32) << 16).view(np.float32)


def choose_large_tile(num_rows: int, num_columns: int, num_terms: int, dtype: torch.dtype) -> Any:
    """Return a tile for the interpreter, whose time is that of the number of programs."""
    import triton

    from meseta.ops.linear.triton import ProductTile

    sizes = zip((num_rows, num_columns, num_terms), MAX_TILE, strict=True)
    return ProductTile(*(min(triton.next_power_of_2(max(size, 1)), limit) for size, limit in sizes), num_warps=4)


def _multiply_to_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(dtype), b.to(dtype))


LIBRARY.impl("mm.dtype", _multiply_to_dtype, "CPU")
