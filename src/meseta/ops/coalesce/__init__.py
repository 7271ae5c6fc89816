"""Summation of the gradient contributions of a batch to each touched row, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.ops.coalesce import reference
from meseta.ops.common import contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError

BLOCK_SAMPLES = 256
"""Number of global samples per block. Contributions are summed within blocks before block sums are added."""


def coalesce(
    ids: Int[Tensor, " nnz"],
    source: Int[Tensor, " nnz"],
    block: Int[Tensor, " nnz"],
    gradient: Float[Tensor, "G D"],
    scale: Float[Tensor, " nnz"] | None = None,
) -> tuple[Int[Tensor, " U"], Float[Tensor, "U D"]]:
    """Return the touched rows in ascending order, and the sum of `scale[i] * gradient[source[i]]` for each row.

    Contributions to a row are summed from left to right within a block, and then the block sums from left to right. The
    result therefore does not depend on threads or plans. GPUs use the reference.

    Example: ids [7, 3, 7] and source [0, 1, 2] return rows [3, 7] and sums [g1, g0 + g2].

    Args:
        ids: Row of each contribution. Contributions are ordered by (feature, global sample, position).
        source: Row of `gradient` of each contribution.
        block: Block of each contribution. It increases with (feature, global sample // BLOCK_SAMPLES).
        gradient: float32 or float64. It may be a strided view whose last dimension is contiguous.
        scale: Factor of each contribution. Products are rounded before they are added.

    Raises:
        MesetaError: Tensors have different lengths or, on a CPU, a source is outside the gradient.
    """
    rows, sums = _operator(ids, source, block, gradient, scale)
    return rows, sums


def _cpu(ids: Tensor, source: Tensor, block: Tensor, gradient: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if gradient.dim() != 2 or gradient.dtype not in (torch.float32, torch.float64):
        raise MesetaError(f"coalesce: gradient is {gradient.dtype} {list(gradient.shape)}; pass float32 or 64 [G, D]")
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    ids, source = contiguous_ids("coalesce", ids), contiguous_ids("coalesce", source, "source").to(torch.int64)
    block = contiguous_ids("coalesce", block, "block").to(torch.int64)
    if scale is not None and scale.shape != ids.shape:
        raise MesetaError(f"coalesce: scale is {list(scale.shape)} for {ids.numel()} ids; pass one number per id")
    scale = None if scale is None else scale.to(gradient.dtype).contiguous()
    rows = empty((ids.numel(),), torch.int64)
    sums = empty((ids.numel(), gradient.shape[1]), gradient.dtype)
    run = core().coalesce_float64 if gradient.dtype == torch.float64 else core().coalesce_float32
    try:
        num_rows = run(
            ids.to(torch.int64).numpy(),
            source.numpy(),
            block.numpy(),
            gradient.numpy(),
            None if scale is None else scale.numpy(),
            rows.numpy(),
            sums.numpy(),
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"coalesce: {error}") from None
    return rows[:num_rows], sums[:num_rows]


def _fake(ids: Tensor, source: Tensor, block: Tensor, gradient: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(num_rows, dtype=torch.int64), gradient.new_empty(num_rows, gradient.shape[1])


_operator = register(
    "coalesce(Tensor ids, Tensor source, Tensor block, Tensor gradient, Tensor? scale) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=reference.coalesce,
    fake=_fake,
)
