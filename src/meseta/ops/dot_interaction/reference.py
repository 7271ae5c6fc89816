"""Reference of `dot_interaction` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.sparse.shapes import Float

BatchedMatmul = Callable[[Tensor, Tensor], Tensor]


def dot_interaction(
    x: Float[Tensor, "B D"], pooled: Float[Tensor, "B F_times_D"], bmm: BatchedMatmul = torch.bmm
) -> Float[Tensor, "B D_plus_P"]:
    """Implement `meseta.ops.dot_interaction.dot_interaction` in plain PyTorch, with `bmm` for its products."""
    vectors, index = _vectors(x, pooled)
    products = bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    # One flat index_select costs a quarter of indexing with two index tensors.
    return torch.cat([x, products.index_select(1, index).to(x.dtype)], dim=1)


def dot_interaction_backward(
    gradient: Float[Tensor, "B D_plus_P"],
    x: Float[Tensor, "B D"],
    pooled: Float[Tensor, "B F_times_D"],
    bmm: BatchedMatmul = torch.bmm,
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B F_times_D"]]:
    """Return the gradients of x and pooled. The gradient of a product scales the other vector of the pair."""
    vectors, index = _vectors(x, pooled)
    size, width = vectors.shape[1], x.shape[1]
    products = gradient.new_zeros(len(x), size * size, dtype=vectors.dtype)
    products.index_copy_(1, index, gradient[:, width:].to(vectors.dtype))
    products = products.unflatten(1, (size, size))
    result = bmm(products + products.transpose(1, 2), vectors).flatten(1)
    direct = gradient[:, :width].to(vectors.dtype)
    return (result[:, :width] + direct).to(x.dtype), result[:, width:].to(pooled.dtype)


def _vectors(x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Return all vectors as [B, F + 1, D], and the flat indices of the lower triangle of their products."""
    vectors = torch.cat([x.to(pooled.dtype), pooled], dim=1).unflatten(1, (-1, x.shape[1]))
    size = vectors.shape[1]
    if x.is_cuda:  # Each operator would be a kernel launch, so use a cached constant.
        return vectors, device_constant(_lower_triangle(size), x.device)
    rows, columns = torch.tril_indices(size, size, offset=-1, device=x.device)
    return vectors, rows * size + columns


@lru_cache
def _lower_triangle(size: int) -> tuple[int, ...]:
    return tuple(row * size + column for row in range(size) for column in range(row))
