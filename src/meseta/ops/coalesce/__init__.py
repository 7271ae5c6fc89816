"""Add up the contributions of a batch to each touched row, in the contract's order."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.coalesce import reference
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.memory import empty
from meseta.ops.tables import contiguous_ids
from meseta.spec import MesetaError

BLOCK_SAMPLES = 256
"""Contributions are summed from left to right inside blocks of this many global samples; block sums are added after."""


def coalesce(
    ids: Int[Tensor, " nnz"],
    source: Int[Tensor, " nnz"],
    block: Int[Tensor, " nnz"],
    gradient: Float[Tensor, "G D"],
    scale: Float[Tensor, " nnz"] | None = None,
) -> tuple[Int[Tensor, " U"], Float[Tensor, "U D"]]:
    """Touched rows in ascending order, and for each the sum of `scale[i] * gradient[source[i]]` over its ids.

    Contribution i belongs to row `ids[i]`; contributions come ordered by (feature, global sample, position), and
    `block` [nnz] grows with (feature, global sample // 256). Contributions to a row are summed left to right inside a
    block, then the block sums are added left to right, so the result does not depend on threads or plans. Products are
    rounded before they are added. `gradient` may be a strided view whose last dim is contiguous.

        ids = [7, 3, 7], source = [0, 1, 2]   ->   rows = [3, 7], sums = [g1, g0 + g2]

    Float32 or float64; runs on the CPU's compiled core, on the reference elsewhere. Raises MesetaError for tensors of
    unequal length and, on a CPU, for a source outside the gradient.
    """
    rows, sums = _operator(ids, source, block, gradient, scale)
    return rows, sums


def _cpu(ids: Tensor, source: Tensor, block: Tensor, gradient: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if gradient.dim() != 2 or gradient.dtype not in (torch.float32, torch.float64):
        raise MesetaError(f"coalesce: gradient is {gradient.dtype} {list(gradient.shape)}; give float32 or 64 [G, D]")
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    ids, source = contiguous_ids("coalesce", ids), contiguous_ids("coalesce", source, "source").to(torch.int64)
    block = contiguous_ids("coalesce", block, "block").to(torch.int64)
    if scale is not None and scale.shape != ids.shape:
        raise MesetaError(f"coalesce: scale is {list(scale.shape)} for {ids.numel()} ids; give one number per id")
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
